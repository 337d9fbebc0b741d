// One job: is what it does usual? And what is it?
import { html, useEffect, useMemo, useRef, useState } from './base.js';
import { ask, download, known, now, useTopics } from './store.js';
import { bytes, chosen, clean, date, day, hms, left, many, meant, midnight, month, ms, number, short, signalName, took, upper,
  visible, when, zone, zoneName } from './format.js';
import { Icon } from './icons.js';
import { OUTCOMES, ahead, byOccurrence, cause, halted, judge, word, worst } from './judge.js';
import { Btn, Chip, Failed, In, Live, On, Silent, Since, Txt, useLoaded } from './parts.js';
import { act } from './actions.js';
import { Happened, blamed, useRun } from './overview.js';
import { go, jobLink, setQuery } from './router.js';
import { useKeys } from './keys.js';
import { Chart } from './chart.js';
import { Occurrence } from './occurrence.js';

const enc = encodeURIComponent;
/** How often a job that runs each second is asked for anew, ms. */
const SETTLE = 2000;
/** So much of a description is shown at once, in UTF-16 units. */
const LONG = 400;

/** Changes when the job's history does; at most every two seconds. */
function useRound(job) {
  const last = job?.recent?.[0];
  const newest = job && [last?.occurrence, last?.attempt, last?.outcome, ...job.running.map((r) => r.run_id)].join();
  const [round, set] = useState(newest);
  const due = useRef(0);
  useEffect(() => {
    if (newest === round) return undefined;
    const timer = setTimeout(() => {
      due.current = Date.now() + SETTLE;
      set(newest);
    }, Math.max(0, due.current - Date.now()));
    return () => clearTimeout(timer);
  }, [newest]);
  return round;
}

// ---- what it is

function Notes({ job, state }) {
  const n = now();
  const list = [];
  const say = (icon, text) => list.push(html`<li><${Icon} k=${icon} />${text}</li>`);
  if (halted(known)) say('slow', halted(known));
  if (job.unreadable) say('unknown', html`Its state in the store cannot be read: <${Txt}>${job.unreadable}<//>`);
  if (job.paused && state.key !== 'running') {
    say('paused', html`Paused since ${when(Math.floor(ms(job.paused.since) / 1000) * 1000, n)}${job.paused.until
      ? ` until ${when(ms(job.paused.until), n)}` : ', until it is resumed'}${
      job.paused.by && html` by <${Txt}>${job.paused.by}<//>`}${job.paused.reason && html`:
        “<${Txt}>${job.paused.reason}<//>”`}`);
  }
  for (const r of job.running) {
    say('running', html`Attempt ${r.attempt} of <a class="a" href=${jobLink(job.job,
      ms(r.occurrence))}>${when(ms(r.occurrence), n)}</a> runs on
      ${' '}<${On} id=${r.instance} /><${Silent} id=${r.instance} /> for <${Since} t=${ms(r.started_at)} />${job.typical_ms != null
        && `; typical is ${took(job.typical_ms)}`}`);
  }
  for (const a of job.awaited) {
    say('retry', html`Attempt ${a.attempt} of <a class="a" href=${jobLink(job.job,
      ms(a.occurrence))}>${when(ms(a.occurrence), n)}</a> is
      ${' '}${halted(known) ? 'planned for' : html`due in <${In} t=${ms(a.at)} />, at`} ${when(ms(a.at), n)}`);
  }
  if (job.skip) say('skipped', `The next ${job.skip === 1 ? 'occurrence' : `${number(job.skip)} occurrences`} will be skipped`);
  if (job.triggers) say('play', `${many(job.triggers, 'trigger waits', 'triggers wait')} for an instance`);
  if (job.elsewhere) say('drift',
    'The file of the instance that serves this page lacks it: others plan and run it, and know its definition.');
  if (job.other_definition) say('drift',
    'The fleet has another definition of it than this instance. An occurrence runs by the definition of the instance'
      + ' that wins it.');
  if (job.quarantined) say('planned',
    'Its state is from before the store lost data; nothing is granted until an instance adopts it.');
  if (job.decided_ahead) say('slow', html`Everything up to ${when(ms(job.decided_ahead), n)} counts as decided, because
    the store’s clock was wrong. <code>soloist rewind ${clean(job.job)}</code> corrects it.`);
  if (!job.known) say('planned', 'No instance has registered it with the store yet.');
  return list.length ? html`<ul class="also notes" aria-label="State">${list}</ul>` : null;
}

/** What a person wrote of the job. It ends as a sentence, and a long one is shown as a whole when asked for. */
function Described({ text }) {
  const [all, set] = useState(false);
  const long = text.length > LONG;
  const shown = all || !long ? text : `${text.slice(0, LONG).replace(/[\ud800-\udbff]$/, '').trimEnd()}…`;
  return html`<${Txt}>${shown}<//>${/[.!?…]\s*$/.test(shown) ? ' ' : '. '}${long && html`<button type="button" class="lk"
    aria-expanded=${String(all)} onClick=${() => set(!all)}>${all ? 'less' : 'all of it'}</button> `}`;
}

function Actions({ job }) {
  return html`<${Btn} icon="play" acts onClick=${() => act('trigger', job.job)}>Trigger …<//>
    ${job.paused ? html`<${Btn} icon="running" acts onClick=${() => act('resume', job.job)}>Resume …<//>`
    : html`<${Btn} icon="pause" acts onClick=${() => act('pause', job.job)}>Pause …<//>`}
    ${job.schedule.length > 0 && html`<${Btn} icon="skipped" acts onClick=${() => act('skip', job.job)}>Skip …<//>`}
    ${job.running.length + job.awaited.length > 0 && html`<${Btn} icon="cancelled" acts onClick=${() => act('cancel',
      job.job)}>Cancel …<//>`}`;
}

/** `write` writes its first word. */
function Coming({ job, write }) {
  if (!job.enabled) return write('switched off');
  if (job.elsewhere) return write('planned by other instances');
  if (!job.schedule.length) return write('runs only when triggered');
  if (!known.store.reachable) return write('next when the store answers');
  if (!job.next) return write(ahead(job));
  if (halted(known)) return html`${write('planned')} for ${when(ms(job.next), now())}`;
  return html`${write('next')} in <${Live} f=${(t) => left(ms(job.next) - t)} />`;
}

const LABELS = {
  overlap: 'Overlap', on_crash: 'On crash', timeout_ms: 'Timeout', grace_ms: 'Grace', lease_ms: 'Lease',
    start_within_ms: 'Start within', catch_up: 'Catch up',
  max_attempts: 'Attempts at most', retry: 'Retry', jitter_ms: 'Jitter', user: 'User', group: 'Group',
    success_codes: 'Success codes', hosts: 'Hosts',
  digest: 'Digest', output_keep_bytes: 'Output kept', dst: 'Daylight saving',
};
/** Its keys say `attempts` of those after the first: the row above counts all. */
const RETRY = { attempts: 'further attempts' };
const label = (k) => LABELS[k] || k.replace(/_ms$|_bytes$/, '').replace(/_/g, ' ').replace(/^./, (c) =>
  c.toUpperCase());
function valueOf(k, v) {
  if (v == null || (Array.isArray(v) && !v.length)) return null;
  if (k.endsWith('_ms')) return v === 0 ? 'none' : chosen(v);
  if (k.endsWith('_bytes')) return bytes(v);
  if (Array.isArray(v)) return v.map(clean).join(', ');
  if (typeof v === 'object') return Object.entries(v).map(([a, b]) => `${RETRY[a] ?? a.replace(/_ms$/, '').replace(/_/g, ' ')} ${valueOf(a, b)
    ?? 'none'}`).join(', ');
  return clean(v);
}

function Definition({ job, detail }) {
  const d = detail?.definition || {};
  const row = (k, v) => v != null && html`<dt>${k}</dt><dd>${v}</dd>`;
  return html`<div><h2 class="h2">Definition</h2><dl class="kv">
    ${row('Schedule', job.schedule.length ? html`<code>${job.schedule.map(clean).join('\n')}</code>`
      : 'none; it runs when triggered')}
    ${row('Zone', clean(job.timezone))}
    ${Object.entries(d).map(([k, v]) => row(label(k), valueOf(k, v)))}
  </dl><p class="t3 gap-s">The command and its environment are not shown here; they stand
    in <code>jobs.toml</code>.</p></div>`;
}

function Next({ job, detail }) {
  const list = detail?.upcoming || [];
  const utc = (u) => ms(u.at);
  // The job's own zone, if it is another than the page's.
  const other = job.timezone !== zone;
  const there = (text) => clean(text || '').replace('T', ' ').replace(/([+-]\d\d:\d\d)$/, ' $1');
  return html`<div><h2 class="h2">Next five${list.length > 0 && html`<button type="button" class="lk t3 ics"
    data-tip="For a calendar program, the next 14 days" onClick=${() =>
      download(`api/v1/jobs/${enc(job.job)}/calendar.ics`, `${job.job}.ics`).catch((e) =>
        alert(e.message))}>calendar.ics</button>`}</h2>
    ${list.length ? html`<table><thead><tr><th>At, ${zoneName}</th>${other && html`<th
      class="n-z">${clean(job.timezone)}</th>`}<th class="num">In</th></tr></thead>
    <tbody>${list.map((u) => html`<tr key=${utc(u)}><td>${day(utc(u), now())} ${hms(utc(u))}</td>
      ${other && html`<td class="t3 n-z">${there(u.local)}</td>`}<td class="num t2"><${Live} f=${(t) => (halted(known) ? '–' : left(utc(u) - t))}
        /></td></tr>`)}</tbody></table>`
    : html`<p class="t2">${job.schedule.length ? (job.enabled ? `None: ${ahead(job)}.` : 'None: it is switched off.')
      : 'It has no schedule.'}</p>`}
  </div>`;
}

// ---- what it did

/** Why it needs attention: the last error, the end of the output, and what the fleet says of it. */
function Wrong({ job, state }) {
  const r = blamed(job, state);
  const run = useRun(job.job, r?.run_id);
  const why = useLoaded(async (signal) => r && ask(`jobs/${enc(job.job)}/why/${ms(r.occurrence)}`, { signal }), [job.job,
    r?.occurrence]);
  return html`<div class="sec wrong"><h2>What went wrong</h2><${Happened} job=${job} state=${state} asks />
    ${run?.output_tail && html`<pre class="def">${visible(run.output_tail)}</pre>`}
    <p class="t2"><${Txt}>${why.data?.verdict}<//></p></div>`;
}

function Days({ job, items }) {
  const n = now();
  const days = new Map();
  for (const i of items) {
    const d = midnight(ms(i.occurrence));
    if (!days.has(d)) days.set(d, []);
    days.get(d).push(i);
  }
  const oldest = items.length ? ms(items[0].occurrence) : n;
  const cells = [];
  for (let k = 29; k >= 0; k--) {
    const d = midnight(n, -k);
    const list = days.get(d) || [];
    const w = list.length ? worst(list.map((i) => i.outcome)) : null;
    const at = w && list.find((i) => i.outcome === w);
    const not = list.filter((i) => i.outcome !== 'succeeded').length;
    const tip = `${day(d, n)}\n${list.length ? `${many(list.length, 'occurrence')}, ${not ? `${not} not succeeded: ${word(w)}`
      : 'all succeeded'}`
      : d + 86_400_000 < oldest ? 'nothing is kept' : 'none'}`;
    const num = new Date(d).getDate();
    const face = html`<i class=${!w ? 'empty' : w === 'succeeded' ? 'well' : ''}>${w && w !== 'succeeded'
      ? html`<${Icon} k=${w} />`
      : list.some((i) => i.attempts > 1) ? html`<${Icon} k="retry" c="quiet" />` : ''}</i><span>${num === 1
        ? html`<b>${month(d)}</b>` : num}</span>`;
    cells.push(at ? html`<a key=${d} href=${jobLink(job, ms(at.occurrence))} data-tip=${tip}
      aria-label=${tip.replace('\n', ': ')}>${face}</a>`
      : html`<span key=${d} class="c" data-tip=${tip}>${face}</span>`);
  }
  return html`<div class="days">${cells}</div>`;
}

/** Why it ran, if not by its schedule, and why it ended so, or did not run. */
const reason = (r) => [r.trigger !== 'schedule' && r.attempts && cause(r.trigger), r.exit_code && `exit ${r.exit_code}`,
  r.signal != null && signalName(r.signal), r.error].filter(Boolean).join('; ');

/** What did not run for the same reason, one after the other, is one row. Newest first. */
function folded(items) {
  const rows = [];
  for (const i of items) {
    const was = rows[rows.length - 1];
    if (was && !was.attempts && !i.attempts && was.outcome === i.outcome && was.error === i.error) {
      rows[rows.length - 1] = { ...was, first: i.occurrence, count: (was.count ?? 1) + (i.count ?? 1) };
    } else rows.push(i);
  }
  return rows;
}

function HistoryRow({ job, item, sel }) {
  const late = item.lateness_ms;
  return html`<tr class=${sel ? 'sel' : ''}>
    <th scope="row"><${Icon} k=${item.outcome} /> <a class=${`x-${item.outcome}`} href=${jobLink(job,
      ms(item.occurrence))}>${word(item.outcome)}
      ${item.count > 1 && ` × ${number(item.count)}`}</a></th>
    <td>${item.first ? `${when(ms(item.first), now(), true)} to ` : ''}${when(ms(item.occurrence), now(), true)}</td>
    <td class=${`num ${late > 1000 ? 'x-missed' : 't2'}`}>${late == null ? '–' : took(late)}</td>
    <td class="num">${item.outcome === 'running' ? html`<${Since} t=${ms(item.started_at)} />`
      : took(item.duration_ms)}</td>
    <td class="t2 h-on"><${On} id=${item.instance} /></td>
    <td class=${`num h-x ${item.attempts > 1 ? '' : 't3'}`}>${item.attempts || '–'}</td>
    <td class="t2 h-x h-why" data-tip=${reason(item)}><${Txt}>${reason(item)}<//></td>
    <td class="num t2 h-m">${bytes(item.peak_memory_bytes)}</td></tr>`;
}

function filtered(items, { out, on, from, to }) {
  const a = from ? meant(from, now(), true) : null;
  const b = to ? meant(to, now(), true) : null;
  const end = b != null && /^\d{4}-\d\d-\d\d$/.test(to) ? midnight(new Date(`${to}T00:00`).getTime(), 1) : b;
  const start = a != null && /^\d{4}-\d\d-\d\d$/.test(from) ? new Date(`${from}T00:00`).getTime() : a;
  return items.filter((i) => (!out || (out === 'tries' ? i.attempts > 1 : i.outcome === out)) && (!on
    || i.instance === on)
    && (start == null || ms(i.occurrence) >= start) && (end == null || ms(i.occurrence) < end));
}

/** Without an answer about what ran: why there is none. */
function Unknown({ error }) {
  if (!error) return html`<p class="none">Asking …</p>`;
  return html`<p class="none">${[503, 504].includes(error.status)
    ? 'The store does not answer, so nobody can say what ran.' : 'There is no answer, so it is not known what ran.'}</p>`;
}

function History({ job, items, list, query, selected, more }) {
  // One record may stand for several that were missed.
  const sum = (of) => of.reduce((n, i) => n + (i.count ?? 1), 0);
  const counts = {};
  for (const i of items) counts[i.outcome] = (counts[i.outcome] || 0) + (i.count ?? 1);
  const tries = items.filter((i) => i.attempts > 1).length;
  const instances = [...new Set(items.map((i) => i.instance).filter(Boolean))].sort();
  const [shown, show] = useState(50);
  const any = query.out || query.on || query.from || query.to;
  const ages = [['from', 'From'], ['to', 'To']];
  return html`<div class="sec"><h2>History<small>${any ? `${number(sum(list))} of ${many(sum(items), 'occurrence')}`
    : many(sum(items), 'occurrence')}</small></h2>
    <div class="bar hist-bar">
      <${Chip} on=${!query.out} n=${sum(items)} onClick=${() => setQuery({ out: '' })}>All<//>
      ${['running', ...OUTCOMES].filter((k) => counts[k]).map((k) => html`<${Chip} key=${k} on=${query.out === k}
        icon=${k} n=${counts[k]}
        onClick=${() => setQuery({ out: query.out === k ? '' : k })}>${word(k)}<//>`)}
      ${tries > 0 && html`<${Chip} on=${query.out === 'tries'} n=${tries} onClick=${() => setQuery({
        out: query.out === 'tries' ? '' : 'tries' })}>more than one attempt<//>`}
      <span class="sp"></span>
      <select class="in" aria-label="On which instance" value=${query.on || ''} onChange=${(e) => setQuery({
        on: e.target.value })}>
        <option value="">on any instance</option>${instances.map((i) => html`<option key=${i}
          value=${i}>${short(i)}</option>`)}</select>
      ${ages.map(([k, text]) => html`<label key=${k} class="t2">${text} <input class="in" type="date"
        aria-label=${`${text} which day`} value=${query[k] || ''} max=${date(now())}
        onChange=${(e) => setQuery({ [k]: e.target.value })} /></label>`)}
    </div>
    ${list.length ? html`<table class="rows hist"><caption class="sr">History
      of ${clean(job)}</caption><thead><tr><th>Outcome</th><th>Planned</th>
      <th class="num">Late</th><th class="num">Took</th><th class="h-on">On</th><th
        class="num h-x">Attempts</th><th class="h-x">Why</th>
      <th class="num h-m">Peak memory</th></tr></thead>
      <tbody>${list.slice(0, shown).map((i) => html`<${HistoryRow} key=${i.occurrence} job=${job} item=${i}
        sel=${ms(i.occurrence) === selected} />`)}</tbody></table>
      ${(list.length > shown || more) && html`<p class="more">${list.length > shown
        ? `${number(list.length - shown)} more. ` : ''}<button type="button" class="btn s"
        onClick=${() => (list.length > shown ? show(shown + 150) : more())}>Older</button></p>`}`
    : html`<p class="none">${any ? html`Nothing matches. <button type="button" class="btn s" onClick=${() => setQuery({
      out: '', on: '', from: '', to: '' })}>Show all</button>`
      : html`Nothing has run yet${known.jobs.get(job)?.next ? `; the next run is planned for ${when(ms(known.jobs.get(job).next),
        now())}` : ''}.`}</p>`}
  </div>`;
}

/** All records that are kept, by pages of 200, as occurrences, oldest first; those that run now at the end. */
function useHistory(name, job, round) {
  const [pages, set] = useState(1);
  const loaded = useLoaded(async (signal) => {
    let [runs, cursor] = [[], null];
    for (let i = 0; i < pages; i++) {
      const q = new URLSearchParams({ limit: '200', ...(cursor && { cursor }) });
      const page = await ask(`jobs/${enc(name)}/runs?${q}`, { signal });
      runs = runs.concat(page.runs);
      cursor = page.next;
      if (!cursor) break;
    }
    return { runs, next: cursor };
  }, [name], [round, pages]);
  const items = useMemo(() => {
    const open = job?.running || [];
    const mine = new Set(open.map((r) => r.run_id));
    return byOccurrence([...(loaded.data?.runs || []).filter((r) => !mine.has(r.run_id)), ...open]);
  }, [loaded.data, job?.running]);
  return { ...loaded, items, more: loaded.data?.next ? () => set(pages + 1) : null };
}

export function Job({ arg: name, query }) {
  useTopics('jobs', 'instances', 'link', 'session');
  const live = known.jobs.get(name);
  const round = useRound(live);
  const detail = useLoaded((signal) => ask(`jobs/${enc(name)}`, { signal }), [name], [live?.next, live?.schedule.join(),
    live?.other_definition]);
  // What was known of a job that is no longer there says nothing any more.
  const job = live || (detail.error?.status === 404 ? null : detail.data);
  const history = useHistory(name, job, round);
  // What is no time is no occurrence.
  const selected = new Date(Number(query.o)).getTime() || null;
  const [at, setAt] = useState(-1);
  const state = job && (known.states.get(name) ?? judge(job, now()));
  const newest = folded(filtered(history.items, query).reverse());
  const open = (o) => go(jobLink(name, o));
  const move = (step) => {
    const i = selected ? newest.findIndex((x) => ms(x.occurrence) === selected) : at;
    const to = Math.max(0, Math.min(newest.length - 1, i + step));
    setAt(to);
    if (selected && newest[to]) setQuery({ o: ms(newest[to].occurrence) });
  };
  useKeys('Job', {
    j: ['older occurrence', () => move(1)], k: ['newer occurrence', () => move(-1)],
    Enter: ['open it', () => (newest[at] ? open(ms(newest[at].occurrence)) : false)],
    Esc: ['close the panel', () => (selected ? setQuery({ o: '' }) : go('#/overview'))],
    t: ['trigger', () => act('trigger', name)], p: ['pause', () => act('pause', name)], r: ['resume', () =>
      act('resume', name)],
    s: ['skip', () => act('skip', name)], c: ['cancel', () => act('cancel', name)], '/': ['search the output', () =>
      document.querySelector('#find')?.focus()],
  });
  if (!job) {
    if (!detail.error) return html`<h1 class="verdict">${clean(name)}</h1><p class="sub">Asking …</p>`;
    return html`<h1 class="verdict">${!name ? 'The address names no job'
      : detail.error.status === 404 ? html`No job is called “<${Txt}>${name}<//>”` : html`<${Txt}>${name}<//> cannot be shown`}</h1>
      <${Failed} error=${detail.error} again=${detail.again} /><p class="sub"><a class="a" href="#/overview">All
        jobs</a></p>`;
  }
  const words = detail.data?.schedule_words;
  const chart = { job: name, items: history.items, selected, onPick: open };
  return html`<div class=${`job ${selected ? 'open' : ''}`}><div>
    <div class="hd"><${Icon} k=${state.icon} label=${word(state.key)} /><h1><${Txt}>${name}<//></h1>
      ${job.tags.map((t) => html`<span class="tag" key=${t}><${Txt}>${t}<//></span>`)}<span
        class="sp"></span><${Actions} job=${job} /></div>
    <p class="sub">${job.description && html`<${Described} key=${name} text=${job.description} />`}<b>${words
      && html`<${Txt}>${upper(words)}<//>${/\bat \d/i.test(words)
        && job.timezone !== zone ? html` (<${Txt}>${job.timezone}<//>)` : ''}; `}<${Coming} job=${job} write=${words ? String : upper} />.</b></p>
    <${Notes} job=${job} state=${state} />
    ${history.error && html`<${Failed} error=${history.error} again=${history.again} />`}
    ${!history.data ? html`<${Unknown} error=${history.error} />` : html`
    ${job.attention && html`<${Wrong} job=${job} state=${state} />`}
    <div class="sec two lo"><${Chart} ...${chart} label="Took" value=${(i) => i.duration_ms} />
      <${Chart} ...${chart} label="Late" value=${(i) => i.lateness_ms} log /></div>
    <div class="sec"><h2>Last 30 days<small>the worst outcome of each day</small></h2><${Days} job=${name}
      items=${history.items} /></div>
    <${History} job=${name} items=${history.items} list=${newest} query=${query} selected=${selected ?? (at >= 0 && newest[at]
      ? ms(newest[at].occurrence) : null)} more=${history.more} />`}
    <div class="sec two lo facts"><${Next} job=${job} detail=${detail.data} /><${Definition} job=${job} detail=${detail.data}
      /></div>
  </div>${selected && html`<${Occurrence} key=${selected} job=${job} at=${selected} items=${history.items}
    round=${round} />`}</div>`;
}
