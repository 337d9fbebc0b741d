// The calendar: the week to come, by day and hour, from the schedules.
import { html, useState } from './base.js';
import { ask, download, known, now, useTopics } from './store.js';
import { D, H, M, chosen, clean, date, day, hm, midnight, ms, number, took, weekday, when,
  zoneName } from './format.js';
import { Icon } from './icons.js';
import { Failed, Held, Txt, useLoaded, usePhone } from './parts.js';
import { jobLink, link, setQuery } from './router.js';
import { useKeys } from './keys.js';

/** A job with more occurrences in the week is named once, above. */
const FEW = 50;
const LIMIT = 5000;
/** Ten years. */
const WEEKS = 520;
/** Shown of an hour before somebody asks for more. */
const SHOWN = 5;

/** Splits what is planned by day and hour: `day/hour`. */
function arrange(planned, start) {
  const cells = new Map();
  for (const p of planned) {
    const t = ms(p.occurrence);
    const key = `${Math.round((midnight(t) - start) / D)}/${new Date(t).getHours()}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push({ job: p.job, t });
  }
  return cells;
}

function Entry({ job, t }) {
  const j = known.jobs.get(job);
  // What is planned before the next one that will run is passed over.
  const over = t > now() && t < (ms(j?.next) ?? Infinity);
  const paused = over && j?.paused && (!j.paused.until || t < ms(j.paused.until));
  const tip = `${clean(job)} · ${when(t, now())}${j?.typical_ms ? `\ntakes ${took(j.typical_ms)} typically`
    : ''}${over ? `\n${paused ? 'paused then: ' : ''}it will not run` : ''}`;
  return html`<a class=${`en ${over ? 'off' : ''}`} href=${jobLink(job)} data-tip=${tip}><span class="t3">${t % M
    ? when(t, now()).slice(-8) : hm(t)}</span> <${Txt}>${job}<//>${over && html`<${Icon} k=${paused ? 'paused' : 'skipped'}
      label=${paused ? 'paused' : 'skipped'} />`}</a>`;
}

function Cell({ list }) {
  const [all, set] = useState(false);
  if (!list) return null;
  const shown = all ? list : list.slice(0, SHOWN);
  return html`${shown.map((e) => html`<${Entry} key=${e.job + e.t} ...${e} />`)}
    ${list.length > shown.length && html`<button type="button" class="lk t3" onClick=${() =>
      set(true)}>${number(list.length - shown.length)} more</button>`}`;
}

function Often({ list }) {
  const [all, set] = useState(false);
  if (!list.length) return null;
  const shown = all ? list : list.slice(0, 12);
  return html`<div class="often"><h2 class="h2">Many times a day<small>left out below</small></h2><ul>
    ${shown.map((f) => html`<li key=${f.job}><a class="a" href=${jobLink(f.job)}><${Txt}>${f.job}<//></a>
      ${' '}<span class="t3">about every ${chosen(f.every_ms)}${known.jobs.get(f.job)?.paused ? ', paused'
        : ''}</span></li>`)}
    </ul>${list.length > shown.length && html`<button type="button" class="btn s" onClick=${() => set(true)}>
      ${number(list.length - shown.length)} more</button>`}</div>`;
}

function Week({ days, cells, phone, pick, chosen }) {
  const n = now();
  const shownDays = phone ? [days[chosen]] : days;
  const used = Array.from({ length: 24 }, (_, h) => h).filter((h) => shownDays.some((d) => cells.has(`${d.k}/${h}`)));
  const jump = (h, i) => i > 0 && used[i - 1] !== h - 1;
  return html`${phone && html`<div class="bar">${days.map((d) => html`<button type="button" key=${d.k} class="chip"
    aria-pressed=${String(d.k === chosen)} onClick=${() =>
      pick(d.k)}>${weekday(d.t)} ${new Date(d.t).getDate()}</button>`)}</div>`}
  <table class="week"><caption class="sr">Planned occurrences by hour and day</caption>
    <thead><tr><th><span class="sr">Hour</span></th>${shownDays.map((d) => html`<th key=${d.k} scope="col"
      class=${d.today ? 'now' : ''}>${day(d.t, n)}${d.today ? ', today' : ''}${d.hours !== 24 ? ` (${d.hours} h)`
        : ''}</th>`)}</tr></thead>
    <tbody>${used.map((h, i) => html`<tr key=${h} class=${jump(h, i) ? 'jump' : ''}><th
      scope="row">${String(h).padStart(2, '0')}:00</th>
      ${shownDays.map((d) => html`<td key=${d.k} class=${d.today && h < new Date(n).getHours() ? 'past' : ''}><${Cell}
        list=${cells.get(`${d.k}/${h}`)} /></td>`)}</tr>`)}</tbody></table>
  ${!used.length && html`<p class="none">Nothing is planned${phone ? ' on this day' : ' in this week'}${' '}besides what
    runs many times a day.</p>`}`;
}

export function Calendar({ query }) {
  useTopics('session');
  const phone = usePhone();
  const week = Math.max(0, Math.min(WEEKS, Math.trunc(query.week) || 0));
  const [picked, pick] = useState(null);
  const start = midnight(now(), week * 7);
  const from = week === 0 ? now() : start;
  const end = midnight(start, 7);
  const round = Math.floor(now() / (5 * M));
  const { data, error, again } = useLoaded((signal) => ask(`plan?${new URLSearchParams({
    from: new Date(from).toISOString(), to: new Date(end).toISOString(), limit: String(LIMIT),
      per_job: String(FEW) })}`, { signal }),
    [date(start), week, round]);
  const turn = (k) => setQuery({ week: week + k || '' });
  useKeys('Calendar', { '←': ['week before', () => week > 0 && turn(-1)], '→': ['week after', () => week < WEEKS && turn(1)],
    n: ['this week', () => setQuery({ week: '' })] });
  const days = Array.from({ length: 7 }, (_, k) => ({ k, t: midnight(start, k), today: week === 0 && k === 0, hours: Math.round((midnight(start, k
    + 1) - midnight(start, k)) / H) }));
  const cells = data && arrange(data.planned, start);
  const busy = days.find((d) => [...(cells?.keys() || [])].some((k) => k.startsWith(`${d.k}/`)));
  const chosen = picked ?? busy?.k ?? 0;
  return html`<div class="hd"><h1>Calendar</h1><span class="sp"></span><span class="seg" role="group"
    aria-label="Week"><button type="button" aria-label="Week before" disabled=${week <= 0} onClick=${() =>
      turn(-1)}>←</button>
    <button type="button" aria-pressed=${String(week === 0)} onClick=${() => setQuery({ week: '' })}>The week to
      come</button><button type="button" aria-label="Week after" disabled=${week >= WEEKS} onClick=${() => turn(1)}>→</button></span>
    <button type="button" class="btn" data-tip="For a calendar program, the next 14 days" onClick=${() =>
      download('calendar.ics', 'soloist.ics').catch((e) => alert(e.message))}>calendar.ics</button></div>
  <p class="sub">${day(start, now())} to ${day(midnight(start, 6), now())}, ${zoneName}, from the schedules. Jobs choose
    their own zones.${days.some((d) => d.hours !== 24) ? ' The clocks change in this week.' : ''}</p>
  <${Held} />${error && html`<${Failed} error=${error} again=${again} />`}
  ${!data && !error && html`<p class="sub">Asking …</p>`}
  ${data?.truncated && html`<p class="note t2"><${Icon} k="slow" />More is planned than can be shown: the end of the
    week is left out. The <a class="a" href=${link('timeline')}>timeline</a> shows it all.</p>`}
  ${data && html`<${Often} list=${data.frequent} /><${Week} days=${days} cells=${cells}
    phone=${phone}
    chosen=${chosen} pick=${pick} />`}`;
}
