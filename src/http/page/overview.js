// The overview: must I do something? Then a line for each job.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from './base.js';
import { ask, known, now, useTopics } from './store.js';
import { clean, left, many, midnight, ms, number, short, signalName, took, upper, when, zoneName } from './format.js';
import { Icon } from './icons.js';
import { ahead, halted, word } from './judge.js';
import { Btn, Chip, In, Live, Memo, On, Seg, Silent, Since, Strip, Txt, useLoaded, usePhone, useSeen } from './parts.js';
import { act } from './actions.js';
import { go, jobLink, setQuery } from './router.js';
import { useKeys } from './keys.js';

// ---- the verdict

/** The sentence that says whether somebody must do something. */
export function verdict() {
  const { fleet, jobs, link: line, states } = known;
  if (!fleet && line.hint) return 'The instance refuses this page';
  if (!fleet) return line.error ? 'The instance does not answer' : 'Asking …';
  if (!line.up && !line.first && !line.hint) return 'This page has lost its instance';
  const why = halted(known);
  if (why) return why;
  if (!jobs.size) return 'There are no jobs yet';
  if (known.asOf == null) return 'The instance has not heard from the store yet';
  let n = 0;
  for (const s of states.values()) n += s.group === 'attention';
  const lost = known.instances?.instances.filter((i) => i.silent).length;
  return [n && `${number(n)} of ${many(jobs.size, 'job')} need${n === 1 ? 's' : ''} attention`,
    lost && `${many(lost, 'instance')} ${lost === 1 ? 'is' : 'are'} not heard from`].filter(Boolean).join('; ')
    || 'Nothing needs attention';
}

function Facts() {
  const i = known.instances;
  const heard = i?.instances.filter((x) => !x.silent).length;
  const latency = i?.store?.latency_ms;
  return html`<p class="sub">
    ${i && known.store.reachable && html`${many(heard, 'instance')} ${heard === 1 ? 'is' : 'are'} heard from${
      latency != null ? `; the store answers in ${took1(latency)}` : ''}.`}
    ${!known.store.reachable && html`The store is silent${known.store.since != null && html` for <${Since}
      t=${known.store.since} />`}: these figures are from before.`}
  </p>`;
}
const took1 = (n) => (n < 10 ? `${n.toFixed(1)}\u00a0ms` : took(n));

export const Verdict = () => html`<div role="status"><h1 class="verdict">${verdict()}</h1></div><${Facts} />`;

// ---- jobs that need attention

const runs = new Map();
/** What only the record of a run says: its exit code and its last line. It does not change, so it is asked for once. */
export function useRun(job, id) {
  const { data } = useLoaded(async (signal) => {
    if (!id) return null;
    if (!runs.has(id)) {
      runs.set(id, await ask(`runs/${encodeURIComponent(id)}?job=${encodeURIComponent(job)}`, { signal }));
    }
    return runs.get(id);
  }, [job, id]);
  return data;
}

function lastLine(text) {
  const lines = (text || '').trimEnd().split('\n');
  const line = clean(lines[lines.length - 1].trim());
  return line.length > 120 ? `${line.slice(0, 119)}…` : line;
}

/** What became of an occurrence. */
function Ended({ job, r, asks }) {
  const run = useRun(job, asks && r?.run_id);
  if (!r) return null;
  const at = when(ms(r.occurrence), now());
  if (!r.attempt) return html`<span>The occurrence of ${at} <b class=${`x-${r.outcome}`}>${r.outcome === 'missed'
    ? 'was missed' : 'may have run'}</b></span>`;
  const tail = run && (run.error ? clean(run.error) : lastLine(run.output_tail));
  return html`<span>The run of ${at} <b class=${`x-${r.outcome}`}>${word(r.outcome)}</b> on <${On} id=${r.instance} />
    ${run?.exit_code != null && ` with exit ${run.exit_code}`}${run?.signal != null && ` by ${signalName(run.signal)}`}
    ${tail && html`, <code><bdi>${tail}</bdi></code>`}</span>`;
}

/** The record that says why a job needs attention. */
export const blamed = (job, state) => job.recent?.find((r) => r.outcome === state.key) ?? job.recent?.[0];

export function Happened({ job, state, asks }) {
  const n = now();
  const [run] = job.running;
  if (state.key === 'unreadable') {
    return html`<span>Its state in the store <b class="x-unknown">cannot be read</b></span>
      <span class="t2"><${Txt}>${job.unreadable}<//>. It does not start.</span>`;
  }
  if (state.key === 'ahead') {
    return html`<span>It does not start before <b class="x-ahead">${when(ms(job.decided_ahead), n)}</b></span>
      <span class="t2">The store’s clock was wrong, so occurrences until then count as decided. <code>soloist rewind
      ${' '}${clean(job.job)}</code> corrects it.</span>`;
  }
  if (state.key === 'slow' || state.key === 'lapsed') {
    return html`<span><b class=${`x-${state.key}`}>Running <${Since} t=${ms(run.started_at)} /></b> on
      ${' '}<${On} id=${run.instance} /><${Silent} id=${run.instance} />${job.typical_ms != null
        && `; typical is ${took(job.typical_ms)}`}</span>
      <span class="t2">${state.key === 'lapsed'
        ? 'Its lease was not renewed for its whole length: its holder is probably gone.'
        : `Planned ${when(ms(run.occurrence), n)}, attempt ${run.attempt}.`}</span>`;
  }
  return html`<${Ended} job=${job.job} r=${blamed(job, state)} asks=${asks} /><span class="t2">${upper(job.attention)}.
    ${run && html` It runs on <${On} id=${run.instance} /><${Silent} id=${run.instance} />, <${Since}
      t=${ms(run.started_at)} /> so far.`}</span>`;
}

function Coming({ job }) {
  const [next] = job.awaited;
  if (!known.store.reachable) return html`<div class="nx">when the store answers</div>`;
  if (halted(known) && (next || job.next)) {
    return html`<div class="nx">${next ? 'next try planned for' : 'planned for'}<br />${when(ms(next?.at ?? job.next),
      now())}</div>`;
  }
  if (next) {
    return html`<div class="nx"><span>next try in <${In} t=${ms(next.at)} /></span><small>${when(ms(next.at),
      now())}</small></div>`;
  }
  if (!job.next) return html`<div class="nx">${ahead(job)}</div>`;
  return html`<div class="nx"><${Live} f=${(t) => (ms(job.next) > t ? `next in ${left(ms(job.next) - t)}`
    : 'due now')} /><small>${when(ms(job.next),
    now())}</small></div>`;
}

function Attend({ job, state, asks }) {
  // It is held in its place although it is well again.
  if (state.group !== 'attention') {
    return html`<li class="w"><${Icon} k=${state.icon} label=${word(state.key)} />
      <a class="nm" href=${jobLink(job.job)}><${Txt}>${job.job}<//></a>
      <div class="wh t2">no longer needs attention: ${word(state.key)}</div></li>`;
  }
  const [run] = job.running;
  const at = ms((job.attention ? blamed(job, state) : run)?.occurrence);
  return html`<li class=${['missed', 'slow', 'ahead', 'overdue'].includes(state.key) ? 'w' : ''}>
    <${Icon} k=${state.icon} label=${word(state.key)} />
    <a class="nm" href=${jobLink(job.job)}><${Txt}>${job.job}<//></a>
    <div class="wh"><${Happened} job=${job} state=${state} asks=${asks} /></div>
    <${Coming} job=${job} />
    <div class="ac">
      ${at != null && html`<${Btn} onClick=${() => go(jobLink(job.job, at))}>${state.key === 'slow' ? 'Follow'
        : state.key === 'missed' ? 'Why' : 'Output'}<//>`}
      ${run || job.awaited.length ? html`<${Btn} acts onClick=${() => act('cancel', job.job)}>Cancel …<//>`
        : html`<${Btn} acts onClick=${() => act('trigger', job.job)}>Trigger …<//>`}
    </div>
  </li>`;
}

/** The names of the jobs that need attention. Those that only run long, which passes, come last. */
export function attention() {
  const list = [];
  for (const [name, state] of known.states) if (state.group === 'attention') list.push([name, state]);
  return list.sort((a, b) => (a[1].key === 'slow') - (b[1].key === 'slow')).map(([name]) => name);
}

const SHOWN = 6;
export function Attention({ names }) {
  const [all, set] = useState(false);
  const list = names.filter((name) => known.jobs.has(name));
  if (!list.length) return null;
  const shown = all ? list : list.slice(0, SHOWN);
  return html`<ul class="att" aria-label="Needs attention">
    ${shown.map((name, i) => html`<${Attend} key=${name} job=${known.jobs.get(name)} state=${known.states.get(name)}
      asks=${i < SHOWN} />`)}
  </ul>
  ${list.length > shown.length && html`<p class="more">${many(list.length - shown.length, 'more job needs',
    'more jobs need')} attention <button type="button" class="btn s" onClick=${() => set(true)}>Show
      them</button></p>`}`;
}

/** What stands above the table is held while somebody is in the table: it would move the rows. */
function useAbove(busy) {
  const want = { names: attention(), facts: facts() };
  const held = useRef(want);
  if (!busy || held.fresh) held.current = want;
  held.fresh = false;
  const old = held.current;
  const differ = (a, b) => a.filter((x) => !b.includes(x)).length + b.filter((x) => !a.includes(x)).length;
  const keys = (list) => list.map(({ key }) => key);
  const waiting = differ(want.names, old.names) + differ(keys(want.facts), keys(old.facts));
  return { ...old, waiting, show: () => { held.fresh = true; } };
}

// ---- facts that explain

/** Each has a key that stays the same for as long as the fact is the same. */
function facts() {
  const n = now();
  const list = [];
  const { fleet, instances } = known;
  const say = (icon, key, text) => list.push({ icon, key, text });
  const paused = [...known.jobs.values()].filter((j) => known.states.get(j.job)?.key === 'paused');
  for (const j of paused.slice(0, 3)) {
    say('paused', `paused ${j.job}`, html`<a href=${jobLink(j.job)}><${Txt}>${j.job}<//></a> is
      paused${j.paused.by && html` by <${Txt}>${j.paused.by}<//>`}
      ${j.paused.until ? ` until ${when(ms(j.paused.until), n)}` : ' until it is resumed'}
      ${j.paused.reason && html`: “<${Txt}>${j.paused.reason}<//>”`}`);
  }
  if (paused.length > 3) say('paused', 'more paused',
    `${many(paused.length - 3, 'more job is', 'more jobs are')} paused`);
  for (const i of instances?.instances || []) {
    const who = html`<a href="#/instances"><${Txt}>${short(i.instance)}<//></a>`;
    if (i.silent) say('lease_lost', `silent ${i.instance}`, html`${who} is not heard from
      since ${when(Math.floor(ms(i.last_seen) / 1000) * 1000, n)}`);
    else if (i.config_differs) say('drift', `differs ${i.instance}`,
      html`${who} runs another configuration than the others`);
    if (i.draining && !i.silent) say('drain', `drains ${i.instance}`, html`${who} is draining`);
    if (i.clock_warning && !i.silent) say('clock', `clock ${i.instance}`, html`the clock of ${who} is off
      by ${took(Math.abs(i.clock_offset_ms))}`);
  }
  const quarantined = [...known.jobs.values()].filter((j) => j.quarantined).length;
  if (quarantined) say('planned', 'quarantined', `${many(quarantined, 'job waits',
    'jobs wait')} until the store’s loss of data is settled`);
  const other = [...known.jobs.values()].filter((j) => j.other_definition).length;
  const lacked = [...known.jobs.values()].filter((j) => j.elsewhere).length;
  if (lacked) say('drift', 'lacked', `the file of this instance lacks ${many(lacked, 'job that other instances have',
    'jobs that other instances have')}`);
  if (other) say('drift', 'other definitions', `${many(other, 'job has',
    'jobs have')} another definition in the fleet than on this instance`);
  if (fleet?.clock_doubt_ms != null) say('clock', 'store clock',
    `the store’s clock is ${took(Math.abs(fleet.clock_doubt_ms))} wrong, as instances measure it`);
  for (const p of fleet?.problems || []) say('slow', p, html`<${Txt}>${p}<//>`);
  return list;
}

const Also = ({ list }) => (list.length ? html`<ul class="also" aria-label="Also">${list.map(({ icon, key, text }) =>
  html`<li key=${key}><${Icon} k=${icon} />${text}</li>`)}</ul>` : null);


// ---- the table

const ORDERS = [['tag', 'Tag'], ['next', 'Next'], ['took', 'Took'], ['late', 'Late'], ['name', 'Name']];
const GROUPS = [['attention', 'slow', 'Attention'], ['running', 'running', 'Running'], ['paused', 'paused', 'Paused'],
  ['never', 'planned', 'Not run yet'], ['well', 'succeeded', 'Well']];
/** A job that runs counts as running, too, if it needs attention. */
const isOf = (job, group) => (group === 'running' ? job.running.length > 0 : known.states.get(job.job).group === group);
const nextOf = (j) => ms(j.awaited[0]?.at ?? j.next) ?? Infinity;
/**
 * Of the occurrence that the row tells of. A later attempt is not late: it was planned anew. Of one that goes on the
 * instance says no lateness yet, but when it was granted.
 */
export function lateOf({ running: [run], last, recent }) {
  if (run) return run.attempt === 1 ? Math.max(0, ms(run.started_at) - ms(run.occurrence)) : -1;
  return recent?.find((r) => r.attempt === 1 && r.occurrence === last?.occurrence)?.lateness_ms ?? -1;
}
const BY = {
  next: (a, b) => nextOf(a) - nextOf(b),
  took: (a, b) => (b.last?.duration_ms || 0) / (b.typical_ms || 1) - (a.last?.duration_ms || 0) / (a.typical_ms || 1),
  late: (a, b) => lateOf(b) - lateOf(a),
  name: (a, b) => (a.job < b.job ? -1 : 1),
};

/** The names that match, in order. By tag the order of the configuration stays within a tag. */
function ordered({ q = '', f = '', sort = 'tag' }) {
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const list = [];
  for (const job of known.jobs.values()) {
    if (f && !isOf(job, f)) continue;
    const text = `${job.job} ${job.tags.join(' ')} ${job.description || ''}`.toLowerCase();
    if (words.every((w) => text.includes(w))) list.push(job);
  }
  if (sort === 'tag') {
    const tag = (j) => j.tags[0] ?? '\uffff';
    list.sort((a, b) => (tag(a) === tag(b) ? 0 : tag(a) < tag(b) ? -1 : 1));
  } else list.sort(BY[sort] || BY.name);
  return list.map((j) => j.job);
}

/**
 * The order that is shown. While the pointer or the focus is in the table it stays, and `waiting` says how many moved.
 */
function useOrder(query, busy) {
  const want = ordered(query);
  const key = `${query.q}|${query.f}|${query.sort}`;
  const held = useRef({ list: want, key });
  let waiting = 0;
  const old = held.current.list;
  const same = old.length === want.length && old.every((name, i) => name === want[i]);
  if (!same) {
    if (held.current.key === key && busy) {
      const place = new Map(old.map((name, i) => [name, i]));
      want.forEach((name, i) => {
        waiting += place.get(name) !== i;
      });
      waiting = Math.max(waiting, Math.abs(old.length - want.length));
    } else held.current = { list: want, key };
  }
  held.current.key = key;
  const list = waiting ? old.filter((name) => known.jobs.has(name)) : held.current.list;
  return { list, waiting, show: () => { held.current = { list: want, key }; } };
}

const FOLDED = 'soloist-folded';
const foldedAtFirst = () => new Set(JSON.parse(sessionStorage.getItem(FOLDED) || '[]'));

/** Lines of the table: jobs, and before them their tag. */
function linesOf(list, sort, folded) {
  if (sort !== 'tag') return list.map((name) => ({ name }));
  const groups = new Map();
  for (const name of list) {
    const tag = known.jobs.get(name).tags[0] ?? '';
    if (!groups.has(tag)) groups.set(tag, []);
    groups.get(tag).push(name);
  }
  if (groups.size === 1 && groups.has('')) return list.map((name) => ({ name }));
  const lines = [];
  for (const [tag, names] of groups) {
    lines.push({ tag, names });
    if (!folded.has(tag)) for (const name of names) lines.push({ name });
  }
  return lines;
}

function Group({ tag, names, folded, toggle, phone }) {
  const bad = names.filter((n) => known.states.get(n)?.group === 'attention');
  return html`<tr class="grp" role="row"><th colspan="10" scope="rowgroup" role="rowheader">
    <button type="button" aria-expanded=${String(!folded)} onClick=${toggle}><${Icon} k=${folded ? 'unfold' : 'fold'} />
    <${Txt}>${tag || 'without a tag'}<//></button><small>${number(names.length)}</small>
    ${(folded || phone) && bad.length > 0 && html`<small class="x-failed"><${Icon} k=${known.states.get(bad[0]).icon}
      /> ${bad.length}</small>`}
  </th></tr>`;
}

function NextCells({ job, state }) {
  const [wait] = job.awaited;
  const n = now();
  if (state.key === 'paused') {
    return html`<td class="num c-x" role="cell"><span class="x-paused">paused</span></td>
      <td class="t3 c-at" role="cell">${job.paused.until ? `until ${when(ms(job.paused.until), n)}`
        : 'until resumed'}</td>`;
  }
  if (wait) {
    return html`<td class="num c-x" role="cell"><span class="x-retry">retry <${Live} f=${(t) => (halted(known) ? '' : left(ms(wait.at) - t))} /></span></td>
      <td class="t3 c-at" role="cell">${when(ms(wait.at), n, true)}</td>`;
  }
  const at = ms(job.next);
  return html`<td class="num c-x" role="cell">${at == null ? html`<span class="t3">${job.enabled ? '–' : 'off'}</span>`
    : html`<${Live} f=${(t) => (halted(known) ? '–' : at > t ? left(at - t) : 'now')} />`}</td>
    <td class="t3 c-at" role="cell">${at != null && when(at, n, true)}${job.enabled && job.skip > 0 && html`<span
      data-tip=${`The next ${job.skip === 1 ? '' : `${number(job.skip)} `}will be skipped`}>
      ${` after ${number(job.skip)} skipped`}</span>`}</td>`;
}

/** Marks a row for two seconds when what it says of `name` has changed. */
function useMark(ref, name, ...what) {
  const was = useRef(null);
  useEffect(() => {
    const now = what.join();
    const calm = matchMedia('(prefers-reduced-motion:reduce)').matches;
    const marked = was.current?.name === name && was.current.now !== now && !calm;
    ref.current?.classList.toggle('flash', marked);
    was.current = { name, now };
    const timer = setTimeout(() => ref.current?.classList.remove('flash'), 2000);
    return () => clearTimeout(timer);
  }, [name, ...what]);
}

/**
 * The row that each job of `drawn` is drawn in, by its number. Of a new list a job that comes takes the row of one that
 * goes: to make a row costs more than to change what it says. The row with the focus is left alone. While somebody
 * scrolls it is the other way round, as rows would have to be moved.
 */
function useRows(lines, drawn, table) {
  const rows = useRef({ of: new Map(), made: 0 }).current;
  const names = new Set(drawn.map((line) => line.name));
  const focused = table.current?.contains(document.activeElement)
    && document.activeElement.closest('tr.row')?.dataset.job;
  const free = [];
  for (const [name, row] of rows.of) {
    if (names.has(name)) continue;
    rows.of.delete(name);
    if (lines !== rows.lines && name !== focused) free.push(row);
  }
  rows.lines = lines;
  for (const { name } of drawn) if (name && !rows.of.has(name)) rows.of.set(name, free.shift() ?? rows.made++);
  return rows.of;
}

const touch = matchMedia('(pointer:coarse)');

function Row({ job, state, sel, index, pick }) {
  const row = useRef();
  // The buttons are a third of a row, and few rows are ever pointed at. A finger points at nothing before it presses.
  const [near, come] = useState(null);
  useMark(row, job.job, state.key, job.last?.run_id);
  const [run] = job.running;
  const late = lateOf(job);
  const on = (run || job.last)?.instance;
  const shown = run?.occurrence ?? job.recent?.[0]?.occurrence;
  const typical = job.typical_ms;
  return html`<tr class=${`row ${sel ? 'sel' : ''} ${job.quarantined ? 'held' : ''}`} ref=${row} role="row" aria-rowindex=${index + 2}
    data-job=${job.job} onPointerMove=${() => come(job.job)} onFocusCapture=${() => pick(job.job)}>
    <td class="c-s" role="cell"><span data-tip=${word(state.key)}><${Icon} k=${state.icon} label=${word(state.key)}
      /></span></td>
    <th class="c-n" scope="row" role="rowheader"><a href=${jobLink(job.job)}><${Txt}>${job.job}<//></a>
      ${job.elsewhere ? html`<span class="d">not in this instance’s file</span>`
        : job.description && html`<${Txt} c="d">${job.description}<//>`}</th>
    <td class="c-b" role="cell"><${Strip} job=${job} /></td>
    <${NextCells} job=${job} state=${state} />
    <td class="num c-t" role="cell">${run ? html`<span class=${`x-${state.key}`}><${Since} t=${ms(run.started_at)}
      /> …</span>`
      : took(job.last?.duration_ms)}</td>
    <td class="num c-ty t3" role="cell">${took(typical)}</td>
    <td class=${`num c-l ${late > 1000 ? 'x-missed' : 't2'}`} role="cell" data-tip=${run && late >= 0
      ? 'Until it was granted. What it waited on its host is counted when it ends.' : null}>${late < 0 ? '–' : took(late)}</td>
    <td class="t2 c-o" role="cell"><${On} id=${on} />${job.running.length > 0 && html`<${Silent} id=${on} />`}</td>
    <td class="c-a" role="cell">${(near === job.job || sel || touch.matches) && html`<div class="acts">
      <${Btn} c="q" icon="play" label=${`Trigger ${clean(job.job)}`} tip="Trigger … (t)" acts onClick=${() =>
        act('trigger', job.job)} />
      ${job.paused ? html`<${Btn} c="q" icon="running" label=${`Resume ${clean(job.job)}`} tip="Resume … (r)" acts
        onClick=${() => act('resume', job.job)} />` : html`<${Btn} c="q" icon="pause" label=${`Pause ${clean(job.job)}`}
        tip="Pause … (p)" acts onClick=${() => act('pause', job.job)} />`}
      <${Btn} c="q" icon="logs" label=${`Output of ${clean(job.job)}`} tip="Output (o)"
        onClick=${() => go(jobLink(job.job, shown && ms(shown)))} />
    </div>`}</td>
  </tr>`;
}

const Head = () => html`<thead role="rowgroup"><tr role="row">
  <th class="c-s" role="columnheader"><span class="sr">State</span></th><th class="c-n" role="columnheader">Job</th>
  <th class="c-b" role="columnheader">Last 24 occurrences</th><th class="num c-x" role="columnheader">Next in</th>
  <th class="c-at" role="columnheader">At, ${zoneName}</th><th class="num c-t" role="columnheader">Took</th>
  <th class="num c-ty" role="columnheader">Typical</th><th class="num c-l" role="columnheader">Late</th>
  <th class="c-o" role="columnheader">On</th><th class="c-a" role="columnheader"><span class="sr">Actions</span></th>
</tr></thead>`;

function Table({ lines, folded, toggle, sel, pick, select, table, phone }) {
  const tops = useMemo(() => {
    const all = [0];
    for (const line of lines) all.push(all[all.length - 1] + (line.names ? 38 : phone ? 64 : 32));
    return all;
  }, [lines, phone]);
  const body = useRef();
  const [from, to, ready] = useSeen(tops, body);
  const drawn = lines.slice(from, to);
  const rows = useRows(lines, drawn, table);
  // The selected row comes into view first, and gets the focus once it is drawn.
  const index = lines.findIndex((l) => l.name === sel);
  useLayoutEffect(() => {
    if (index < 0 || !select.current) return;
    const y = body.current.getBoundingClientRect().top + tops[index];
    if (y < 100) scrollBy(0, y - 120);
    else if (y > innerHeight - 90) scrollBy(0, y - innerHeight + 120);
    const focus = () => body.current?.querySelector('tr.sel a')?.focus({ preventScroll: true });
    focus();
    requestAnimationFrame(focus);
    select.current = false;
  }, [sel, index]);
  const gap = (height) => height > 0 && html`<tr class="gap" role="presentation"><td colspan="10" style=${{
    height: `${height}px` }}></td></tr>`;
  return html`<table class=${`rows board ${halted(known) ? 'held' : ''}`} ref=${table} role="table"
    aria-rowcount=${lines.length + 1}>
    <caption class="sr">Jobs</caption><${Head} />
    <tbody ref=${body} role="rowgroup">${gap(tops[from])}
    ${drawn.map((line, i) => (line.names
    ? html`<${Group} key=${`#${line.tag}`} ...${line} folded=${folded.has(line.tag)} phone=${phone} toggle=${() =>
      toggle(line.tag)} />`
    : html`<${Memo} key=${rows.get(line.name)} waits=${from + i >= ready} same=${[known.jobs.get(line.name),
      known.states.get(line.name)?.key, line.name === sel,
      known.store.reachable, known.link.up, known.session, midnight(now()), from + i]}
      draw=${() => html`<${Row} job=${known.jobs.get(line.name)} state=${known.states.get(line.name)} index=${from + i}
        sel=${line.name === sel} pick=${pick} />`} />`))}
    ${gap(tops[lines.length] - tops[to])}</tbody></table>`;
}

const SAMPLE = `[store]
url = "sqlite:soloist.db"

[jobs.hello]
schedule = "* * * * *"
command = "echo hello"

# then: soloist check, and systemctl reload soloist`;

export function Overview({ query }) {
  useTopics('jobs', 'instances', 'link', 'session');
  const phone = usePhone();
  const table = useRef();
  const [sel, setSel] = useState(null);
  const select = useRef(false);
  const { sort = 'tag', q = '', f = '' } = query;
  const [, again] = useState(0);
  const busy = !!table.current && (table.current.matches(':hover') || table.current.contains(document.activeElement));
  const order = useOrder({ sort, q, f }, busy);
  const above = useAbove(busy);
  const waiting = order.waiting + above.waiting;
  const show = () => {
    order.show();
    above.show();
    again((n) => n + 1);
  };
  const [folded, setFolded] = useState(foldedAtFirst);
  const lines = useMemo(() => linesOf(order.list, sort, folded), [order.list, sort, folded]);
  const names = useMemo(() => lines.filter((line) => line.name).map((line) => line.name), [lines]);
  const toggle = (tag) => {
    const next = new Set(folded);
    if (!next.delete(tag)) next.add(tag);
    sessionStorage.setItem(FOLDED, JSON.stringify([...next]));
    setFolded(next);
  };
  const move = (step) => {
    const at = names.indexOf(sel);
    select.current = true;
    setSel(names[Math.max(0, Math.min(names.length - 1, at < 0 ? 0 : at + step))] ?? null);
  };
  // Keys do nothing to a job that has no line.
  const job = sel && names.includes(sel) && known.jobs.get(sel);
  const onSel = (f2) => () => (job ? f2() : false);
  useKeys('Overview', {
    j: ['next job', () => move(1)], k: ['job before', () => move(-1)],
    Enter: ['open', onSel(() => go(jobLink(sel)))],
    o: ['output', onSel(() => go(jobLink(sel, ms(job.running[0]?.occurrence ?? job.recent?.[0]?.occurrence))))],
    t: ['trigger', onSel(() => act('trigger', sel))], p: ['pause', onSel(() => act('pause', sel))],
    r: ['resume', onSel(() => act('resume', sel))], s: ['skip', onSel(() => act('skip', sel))],
    c: ['cancel', onSel(() => act('cancel', sel))],
    '/': ['filter', () => document.querySelector('#filter')?.focus()],
    Esc: ['no job', onSel(() => setSel(null))],
  });
  // The pointer leaves the table: a new order may come.
  useEffect(() => {
    const f2 = () => again((n) => n + 1);
    const el = table.current;
    for (const k of ['pointerleave', 'focusout']) el?.addEventListener(k, f2);
    return () => {
      for (const k of ['pointerleave', 'focusout']) el?.removeEventListener(k, f2);
    };
  }, [table.current]);
  const jobs = [...known.jobs.values()];
  const count = (group) => jobs.filter((job) => isOf(job, group)).length;
  const all = known.jobs.size;
  if (!known.fleet) return html`<${Verdict} />`;
  return html`<${Verdict} /><${Attention} names=${above.names} /><${Also} list=${above.facts} />
  ${all === 0 ? html`<div class="sec"><p class="t2">These lines in <code>jobs.toml</code> make one:</p><pre
    class="def">${SAMPLE}</pre></div>` : html`
  <div class="bar">
    <input type="search" id="filter" placeholder="Filter jobs" aria-label="Filter jobs by name, tag or description"
      value=${q}
      onInput=${(e) => setQuery({ q: e.target.value })} onKeyDown=${(e) => e.key === 'Escape' && e.target.blur()} />
    <${Chip} on=${!f} n=${all} onClick=${() => setQuery({ f: '' })}>All<//>
    ${GROUPS.map(([k, icon, text]) => html`<${Chip} key=${k} on=${f === k} icon=${icon} n=${count(k)}
      onClick=${() => setQuery({ f: f === k ? '' : k })}>${text}<//>`)}
    <span class="sp"></span>
    ${waiting > 0 && html`<button type="button" class="btn s" onClick=${show}>${waiting} changed, show</button>`}
    <span class="t3 sl">Order</span><span class="order"><${Seg} label="Order" list=${ORDERS} value=${sort}
      onPick=${(k) => setQuery({ sort: k === 'tag' ? '' : k })} /></span>
  </div>
  ${order.list.length ? html`<${Table} lines=${lines} folded=${folded} toggle=${toggle} sel=${sel} pick=${setSel}
    select=${select} table=${table} phone=${phone} />`
    : html`<p class="none">No job matches${q && html` “<${Txt}>${q}<//>”`}${f && ` (${f})`}. <button type="button"
      class="btn s"
      onClick=${() => setQuery({ q: '', f: '' })}>Show all ${number(all)}</button></p>`}`}`;
}
