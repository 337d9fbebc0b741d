// The events: what happened, newest first, as it happens.
import { html, useMemo, useRef, useState } from './base.js';
import { known, now, useTopics } from './store.js';
import { clean, hmsm, day, midnight, ms, number, short, took, when } from './format.js';
import { Icon } from './icons.js';
import { word } from './judge.js';
import { Chip, Txt, usePhone, useSeen } from './parts.js';
import { go, jobLink, setQuery } from './router.js';
import { useKeys } from './keys.js';

const Who = ({ id }) => html`<span data-tip=${clean(id)}><${Txt}>${short(id)}<//></span>`;
const at = (e) => (e.occurrence ? html`, planned ${when(ms(e.occurrence), now())}` : '');
const attempt = (e) => (e.attempt > 1 ? html`, attempt ${e.attempt}` : '');
const more = (e) => (e.count > 1 ? ` and ${number(e.count - 1)} before it` : '');
const because = (e) => (e.reason || e.detail) && html`: <${Txt}>${e.reason || e.detail}<//>`;

// Each kind: its sign, the chip it belongs to, and its sentence after the job's or the instance's name.
const KINDS = {
  granted: [(e) => (e.takeover ? 'replaced' : 'running'), 'runs', (e) => html`${e.takeover ? 'was taken over by'
    : 'started on'} <${Who} id=${e.instance} />${at(e)}${attempt(e)}`],
  ended: [(e) => e.outcome, 'runs', (e) => html`<b class=${`x-${e.outcome}`}>${word(e.outcome)}</b> on <${Who}
    id=${e.instance} />${at(e)}${attempt(e)}${
    e.duration_ms != null ? `, took ${took(e.duration_ms)}` : ''}${e.exit_code ? `, exit ${e.exit_code}` : ''}`],
  missed: [() => 'missed', 'not', (e) => html`<b class="x-missed">missed</b>${at(e)}${more(e)}${because(e)}`],
  unknown: [() => 'unknown', 'not', (e) => html`<b class="x-unknown">unknown</b>${at(e)}${more(e)}: the store lost its
    data, so nobody knows whether ${e.count > 1 ? 'they' : 'it'} ran`],
  skipped: [() => 'skipped', 'not', (e) => html`skipped${at(e)}${more(e)}${because(e)}`],
  awaited: [() => 'retry', 'runs', (e) => html`will be tried again${e.next_at ? ` at ${when(ms(e.next_at), now())}`
    : ''}${at(e)}${attempt(e)}`],
  triggered: [() => 'play', 'acts', (e) => html`triggered${e.key && html`, key <code>${clean(e.key)}</code>`}`],
  paused: [() => 'paused', 'acts', (e) => html`paused${e.until ? ` until ${when(ms(e.until), now())}`
    : ''}${because(e)}`],
  resumed: [() => 'play', 'acts', () => 'resumed'],
  rewound: [() => 'play', 'acts', () => 'counts nothing in the future as decided any more'],
  skip: [() => 'skipped', 'acts', (e) => (e.count ? `will skip the next ${e.count === 1 ? 'occurrence'
    : `${e.count} occurrences`}` : 'will skip nothing')],
  cancelled: [() => 'cancelled', 'acts', () => 'asked to end'],
  draining: [() => 'drain', 'acts', () => 'drains'],
  undrained: [() => 'play', 'acts', () => 'claims again'],
  instance_up: [() => 'succeeded', 'fleet', () => 'is up'],
  instance_silent: [() => 'lease_lost', 'fleet', (e) => html`<b class="x-lease_lost">is not heard from</b>${e.since
    ? ` since ${when(Math.floor(ms(e.since) / 1000) * 1000, now())}` : ''}`],
  data_lost: [() => 'lease_lost', 'fleet', (e) => html`<b class="x-failed">is new, was restarted or lost its
    data</b>${e.until ? `: nothing starts until ${when(Math.ceil(ms(e.until) / 1000) * 1000, now())}` : ''}`],
  instance_gone: [() => 'off', 'fleet', () => 'is gone'],
  configuration: [() => 'drift', 'fleet', (e) => html`configuration${e.config ? html` <code>${clean(e.config).slice(0,
    12)}</code>` : ''} is loaded`],
  undelivered: [() => 'failed', 'fleet', (e) => html`${e.job ? '– ' : `${number(e.count)} jobs: `}<b
    class="x-failed">nobody was told</b> over <${Txt}>${e.channel}<//>${because(e)}`],
  // No instance tells it: the page notes it itself.
  unheard: [() => 'drift', 'fleet', () => 'The page hears another instance now, or one that was started again: events just '
    + 'before may be lacking'],
  job_removed: [() => 'off', 'fleet', () => 'is no longer in the configuration'],
  store: [(e) => (e.reachable ? 'succeeded' : 'lease_lost'), 'fleet', (e) => (e.reachable ? 'answers' : html`<b
    class="x-failed">cannot be reached</b>${e.error && html`: <${Txt}>${e.error}<//>`}`)],
};
const CHIPS = [['runs', 'running', 'Runs'], ['not', 'missed', 'Not run'], ['bad', 'failed', 'Went wrong'], ['acts',
  'play', 'Acts'], ['fleet', 'succeeded', 'Fleet']];
const went = (e) => (e.kind === 'ended' && !['succeeded', 'cancelled', 'replaced'].includes(e.outcome))
  || e.kind === 'missed' || e.kind === 'unknown' || e.kind === 'undelivered'
  || e.kind === 'instance_silent' || e.kind === 'data_lost' || (e.kind === 'store' && !e.reachable);
const has = (e, f) => !f || (f === 'bad' ? went(e) : (KINDS[e.kind]?.[1] ?? 'fleet') === f);

function Item({ e, sel }) {
  const [icon, , text] = KINDS[e.kind] || [() => 'planned', '', () => clean(e.kind)];
  const o = e.occurrence && ms(e.occurrence);
  const t = ms(e.at);
  const far = t < midnight(now());
  return html`<tr class=${sel ? 'sel' : ''}><td class="t3 e-t">${far ? `${day(t, now())} ` : ''}${hmsm(t)}</td><td
    class="e-w"><div><${Icon} k=${icon(e)} />
    ${' '}${e.job ? html`<a class="b a" href=${jobLink(e.job, o)}><${Txt}>${e.job}<//></a>` : e.instance
      && e.kind !== 'configuration' ? html`<a class="b a" href="#/instances"><${Who} id=${e.instance} /></a>`
    : html`<span class="b">${e.kind === 'store' || e.kind === 'data_lost' ? 'the store' : e.instance ? short(e.instance)
      : ''}</span>`} ${text(e)}${e.by && html`, by <${Txt}>${e.by}<//>`}</div></td></tr>`;
}

export function Events({ query }) {
  useTopics('feed');
  const { q = '', f = '' } = query;
  const phone = usePhone();
  // Two lines on a phone, so that the sentence can be read.
  const high = phone ? 56 : 32;
  const body = useRef();
  const box = useRef();
  const held = useRef(null);
  const [sel, setSel] = useState(-1);
  const [, again] = useState(0);
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  // The end of a run that succeeded tells of its start.
  const ended = new Set(known.feed.map((e) => e.kind === 'ended' && e.outcome === 'succeeded' && e.run_id));
  const tells = (e) => e.kind !== 'granted' || e.takeover || !ended.has(e.run_id);
  const feed = known.feed.filter(tells);
  const matches = (e) => tells(e) && has(e, f) && words.every((w) => `${e.job || ''} ${e.instance || ''} ${e.by || ''} ${
    e.kind} ${word(e.outcome || '')}`.toLowerCase().includes(w));
  // What is read stays where it is: new events wait while the list is scrolled, or a row is selected.
  const busy = scrollY > 60 || sel >= 0 || box.current?.matches(':hover');
  const key = `${q}|${f}`;
  if (!busy || !held.current || held.current.key !== key) held.current = { key, newest: known.feed[0],
    list: feed.filter(matches) };
  const { list, newest } = held.current;
  let fresh = 0;
  for (const e of known.feed) {
    if (e === newest) break;
    fresh += matches(e);
  }
  const tops = useMemo(() => Array.from({ length: list.length + 1 }, (_, i) => i * high), [list.length, high]);
  const [from, to] = useSeen(tops, body);
  const show = () => {
    setSel(-1);
    held.current = null;
    scrollTo(0, 0);
    again((n) => n + 1);
  };
  const move = (step) => {
    const i = Math.max(0, Math.min(list.length - 1, sel + step));
    setSel(i);
    const y = body.current.getBoundingClientRect().top + i * high;
    if (y < 100 || y > innerHeight - 90) scrollBy(0, y - innerHeight / 2);
  };
  useKeys('Events', {
    j: ['older', () => move(1)], k: ['newer', () => move(-1)],
    Enter: ['open', () => (list[sel]?.job ? go(jobLink(list[sel].job, list[sel].occurrence && ms(list[sel].occurrence)))
      : false)],
    '/': ['filter', () => document.querySelector('#filter')?.focus()], n: ['newest', show], Esc: ['no row', () =>
      setSel(-1)],
  });
  return html`<h1 class="verdict">Events</h1><p class="sub">As the instance that serves this page has seen them; it
    keeps about a thousand, and longer those that no run tells of. Runs stay in the history of their job.</p>
  <div class="bar"><input type="search" id="filter" placeholder="Filter events"
    aria-label="Filter events by job, instance, kind or outcome" value=${q}
      onInput=${(e) => setQuery({ q: e.target.value })} onKeyDown=${(e) => e.key === 'Escape' && e.target.blur()} />
    <${Chip} on=${!f} n=${feed.length} onClick=${() => setQuery({ f: '' })}>All<//>
    ${CHIPS.map(([k, icon, text]) => html`<${Chip} key=${k} on=${f === k} icon=${icon} n=${feed.filter((e) =>
      has(e, k)).length} onClick=${() => setQuery({ f: f === k ? '' : k })}>${text}<//>`)}
    <span class="sp"></span>${fresh > 0 && html`<button type="button" class="btn s"
      onClick=${show}>${number(fresh)} new, show</button>`}</div>
  ${list.length ? html`<table class="rows ev" ref=${box} aria-rowcount=${list.length + 1}><caption
    class="sr">Events</caption><colgroup><col class="e-t" /><col /></colgroup><thead
      class="sr"><tr><th>At</th><th>What</th></tr></thead><tbody ref=${body}>
    ${from > 0 && html`<tr class="gap"><td colspan="2" style=${{ height: `${from * high}px` }}></td></tr>`}
    ${list.slice(from, to).map((e, i) => html`<${Item} key=${e.cursor ?? from + i} e=${e} sel=${from + i === sel} />`)}
    ${to < list.length && html`<tr class="gap"><td colspan="2" style=${{
      height: `${(list.length - to) * high}px` }}></td></tr>`}</tbody></table>`
    : html`<p class="none">${q || f ? html`No event matches. <button type="button" class="btn s" onClick=${() =>
      setQuery({ q: '', f: '' })}>Show all</button>` : 'Nothing happened yet.'}</p>`}`;
}
