// The load map: where do I put a new job? How many occurrences fall into each minute of a day, from the schedules.
import { html, useEffect, useRef, useState } from './base.js';
import { ask, known, now } from './store.js';
import { D, M, S, clean, date, day, many, hm, midnight, number, took, zone, zoneName } from './format.js';
import { Icon } from './icons.js';
import { Copy, Failed, Txt, say, tipAt, useLoaded, usePhone } from './parts.js';
import { go, jobLink, link, setQuery } from './router.js';
import { useKeys } from './keys.js';
import { colours, fit } from './canvas.js';

const two = (n) => String(n).padStart(2, '0');
/** The local time of a minute of the day; some days have an hour more or less. */
const clock = (data, minute) => hm(Date.parse(data.from) + minute * M);

/** The same schedule, with a minute that the job's name chooses; null if it needs no such change or allows none. */
export function spread(schedule) {
  const short = { '@hourly': '0 * * * *', '@daily': '0 0 * * *', '@midnight': '0 0 * * *' }[schedule.trim()];
  const fields = (short ?? schedule).trim().split(/\s+/);
  if (fields.length !== 5 || /H/.test(fields[0])) return null;
  const step = /^(?:\*|0-59)\/(\d+)$/.exec(fields[0]);
  if (step && 60 % Number(step[1]) === 0 && Number(step[1]) > 1) return [`H/${step[1]}`, ...fields.slice(1)].join(' ');
  return /^\d+$/.test(fields[0]) ? ['H', ...fields.slice(1)].join(' ') : null;
}

/** Where the minutes lie. On a phone the hours stand side by side, so that a cell can be met with a finger. */
function geometry(w, phone, minutes) {
  const hours = Math.ceil(minutes / 60);
  if (phone) {
    const [x0, y0, ch] = [30, 20, 9];
    return { cw: (w - x0) / hours, ch, x0, y0, w, h: y0 + 60 * ch, nx: hours, ny: 60,
      at: (m) => [Math.floor(m / 60), m % 60], of: (x, y) => x * 60 + y };
  }
  const [x0, y0, ch] = [48, 22, 19];
  return { cw: (w - x0 - 46) / 60, ch, x0, y0, w, h: y0 + hours * ch, nx: 60, ny: hours,
    at: (m) => [m % 60, Math.floor(m / 60)], of: (x, y) => y * 60 + x };
}
/** How strong the colour of a cell is, the same on each day: that of one start in each second is full. */
const strength = (n) => (n ? Math.min(1, 0.1 + 0.9 * (Math.log(n) / Math.log(60))) : 0);
const STEPS = [1, 5, 15, 60];

/** How many starts the ordinary minute of the day has: half of the minutes have more. */
const ordinary = (data) => [...data.minutes].sort((x, y) => x - y)[Math.floor(data.minutes.length / 2)];
/**
 * The minutes in which many jobs start: by jobs, because one job may start many times in a minute; and more of them than
 * in the ordinary minute, because what starts in each minute cannot be spread.
 */
function crowdedOf(data) {
  const fullest = Math.max(0, ...data.top.map((t) => t.jobs.length));
  const usual = ordinary(data);
  return data.top.filter((t) => t.jobs.length >= Math.max(3, fullest / 2) && t.count >= usual + 3).slice(0, 6);
}

function paint(canvas, g, data, sel, phone) {
  const { minutes } = data;
  const hour = (h) => clock(data, h * 60);
  const ctx = fit(canvas, g.w, g.h);
  const c = colours();
  const crowded = new Set(crowdedOf(data).map((t) => t.minute));
  minutes.forEach((n, m) => {
    const [x, y] = g.at(m);
    const box = [g.x0 + x * g.cw, g.y0 + y * g.ch, g.cw - (phone ? 1 : 2), g.ch - (phone ? 1 : 2)];
    ctx.fillStyle = n ? c.ac : c.sunk;
    ctx.globalAlpha = n ? strength(n) : 1;
    ctx.beginPath();
    ctx.roundRect(...box, 2);
    ctx.fill();
    ctx.globalAlpha = 1;
    if (crowded.has(m) || m === sel) {
      ctx.strokeStyle = m === sel ? c.ac : c.tx;
      ctx.lineWidth = m === sel ? 2.5 : 1.5;
      ctx.stroke();
    }
  });
  ctx.fillStyle = c.tx3;
  if (phone) {
    ctx.textAlign = 'center';
    for (let h = 0; h < g.nx; h += 3) ctx.fillText(hour(h).slice(0, 2), g.x0 + (h + 0.5) * g.cw, 12);
    ctx.textAlign = 'right';
    for (let m = 0; m < 60; m += 5) ctx.fillText(`:${two(m)}`, g.x0 - 5, g.y0 + m * g.ch + 8);
    return;
  }
  ctx.textAlign = 'right';
  for (let h = 0; h < g.ny; h++) {
    ctx.fillText(hour(h), g.x0 - 8, g.y0 + h * g.ch + 13);
    ctx.fillText(number(minutes.slice(h * 60, h * 60 + 60).reduce((a, b) => a + b, 0)), g.w - 4, g.y0 + h * g.ch + 13);
  }
  ctx.fillText('in all', g.w - 4, 12);
  ctx.textAlign = 'left';
  for (let m = 0; m < 60; m += 5) ctx.fillText(`:${two(m)}`, g.x0 + m * g.cw, 12);
}

function Map({ data, most, start, phone }) {
  const box = useRef();
  const canvas = useRef();
  const [sel, set] = useState(-1);
  const g = useRef();
  const tops = new globalThis.Map(data.top.map((t) => [t.minute, t.jobs]));
  const words = (m) => {
    const names = tops.get(m);
    const n = data.minutes[m];
    return `${clock(data, m)}  ${many(n, 'start')}${n > 1 ? `, ${data.at_once[m]} in its fullest second` : ''}${names ? `\n${names.slice(0,
      12).map(clean).join(', ')}${names.length > 12
      ? ' …' : ''}` : ''}`;
  };
  const draw = () => {
    if (!canvas.current) return;
    g.current = geometry(box.current.clientWidth, phone, data.minutes.length);
    paint(canvas.current, g.current, data, sel, phone);
  };
  useEffect(draw);
  useEffect(() => {
    const f = () => draw();
    for (const k of ['resize', 'themechange']) addEventListener(k, f);
    const scheme = matchMedia('(prefers-color-scheme:dark)');
    scheme.addEventListener('change', f);
    return () => {
      for (const k of ['resize', 'themechange']) removeEventListener(k, f);
      scheme.removeEventListener('change', f);
    };
  });
  const find = (e) => {
    const r = canvas.current.getBoundingClientRect();
    const [x, y] = [Math.floor((e.clientX - r.left - g.current.x0) / g.current.cw),
      Math.floor((e.clientY - r.top - g.current.y0) / g.current.ch)];
    return x >= 0 && x < g.current.nx && y >= 0 && y < g.current.ny ? g.current.of(x, y) : -1;
  };
  const tell = (m) => {
    if (m < 0) return tipAt('');
    const r = canvas.current.getBoundingClientRect();
    const [x, y] = g.current.at(m);
    return tipAt(words(m), r.left + g.current.x0 + (x + 0.5) * g.current.cw, r.top + g.current.y0 + y * g.current.ch,
      g.current.ch);
  };
  const open = (m) => m >= 0 && go(link('timeline', null, { z: '1h', at: new Date(start + m * M).toISOString() }));
  const key = (e) => {
    const step = { ArrowLeft: phone ? -60 : -1, ArrowRight: phone ? 60 : 1, ArrowUp: phone ? -1 : -60, ArrowDown: phone
      ? 1 : 60 }[e.key];
    if (e.key === 'Enter') open(sel);
    if (!step) return;
    e.preventDefault();
    e.stopPropagation();
    const to = sel < 0 ? (data.top[0]?.minute ?? 0) : (sel + step + data.minutes.length) % data.minutes.length;
    set(to);
    tell(to);
    say(words(to));
  };
  return html`<div ref=${box} class="map" tabindex="0" role="group" onKeyDown=${key} onBlur=${() => { set(-1);
    tipAt(''); }} onPointerMove=${(e) => tell(find(e))} onPointerLeave=${() => tipAt('')}
    onClick=${(e) => open(find(e))}
      aria-label=${`Planned starts by minute of the day, at most ${most} in one. Arrow keys go from minute to minute.`}>
    <canvas ref=${canvas} aria-hidden="true"></canvas></div>`;
}

/** Jobs of the fullest minutes whose schedule could leave the minute to `H`: name, schedule, and the other one. */
function spreadable(crowded) {
  const names = new Set(crowded.flatMap((t) => t.jobs));
  const found = [];
  for (const name of names) {
    const job = known.jobs.get(name);
    const to = job?.schedule.length === 1 ? spread(job.schedule[0]) : null;
    if (to) found.push([name, job.schedule[0], to]);
  }
  return found;
}

const SHOWN = 12;
/** The lines to change, as text that can be copied. */
function Lines({ moves }) {
  const width = Math.max(...moves.slice(0, SHOWN).map(([n]) => n.length));
  const text = moves.map(([n, from, to]) => `${clean(n).padEnd(width)}  ${clean(from)} → ${clean(to)}`);
  const more = text.length > SHOWN ? `\n… and ${text.length - SHOWN} more` : '';
  return html`<pre class="def">${text.slice(0, SHOWN).join('\n')}${more}</pre>
    <${Copy} text=${text.join('\n')}>Copy all ${text.length}<//>`;
}

/** The longest jitter to advise: at most half of the time between two occurrences. Undefined: they are too close. */
function jitter(upcoming) {
  const gaps = upcoming.slice(1).map((u, i) => Date.parse(u.at) - Date.parse(upcoming[i].at));
  return [['3m', 3 * M], ['1m', M], ['30s', 30 * S], ['10s', 10 * S]].find(([, length]) =>
    gaps.every((gap) => 2 * length <= gap))?.[0];
}
function Jitter({ name }) {
  const { data } = useLoaded((signal) => ask(`jobs/${encodeURIComponent(name)}`, { signal }), [name]);
  const text = data && jitter(data.upcoming);
  return text ? html`${' '}<code>jitter = "${text}"</code> moves it off them, by the same amount on every host.` : null;
}

/** What would flatten the fullest minutes. It changes nothing itself. */
function Advice({ data }) {
  const crowded = crowdedOf(data);
  const [first] = crowded;
  if (!first) {
    const most = Math.max(...data.at_once);
    return html`<ol class="sug"><li><${Icon} k=${most > 1 ? 'planned' : 'succeeded'} /><div><b>${most > 1
      ? `${clock(data, data.at_once.indexOf(most))}: ${most} jobs start in the same second.` : 'No two jobs start in the same second.'}</b>
      ${' '}<span class="t2">${ordinary(data) ? `The fullest minute has ${number(Math.max(...data.minutes))} starts, the
        ordinary one ${number(ordinary(data))}.` : 'In no minute more than two jobs start.'}${most > 1
        ? ' A jitter moves them apart.' : ''}</span></div></li></ol>`;
  }
  const jobs = first.jobs.map((n) => known.jobs.get(n)).filter(Boolean);
  const heavy = jobs.filter((j) => j.typical_ms > 10 * S).sort((x, y) => y.typical_ms - x.typical_ms)[0];
  const moves = spreadable(crowded);
  const mine = moves.filter(([n]) => first.jobs.includes(n)).length;
  return html`<ol class="sug">
    <li><${Icon} k="slow" /><div><b>${clock(data, first.minute)}: ${many(first.jobs.length, 'job starts',
      'jobs start')} in
      one
      minute.</b> <span class="t2">${mine ? html`${number(mine)} of them could leave their minute to <code>H</code>, if
        the
      exact minute does not matter: the name of the job chooses it, the same on every host.${moves.length > mine
        ? ' So could jobs of other crowded minutes:' : ''}`
    : `None of their schedules can leave the minute to H; a jitter can move them.${moves.length
      ? ' In other crowded minutes these can:' : ''}`}</span>
      ${moves.length > 0 && html`<${Lines} moves=${moves} />`}</div></li>
    ${heavy && html`<li><${Icon} k="slow" /><div><b>${clock(data, first.minute)}: <a class="a"
      href=${jobLink(heavy.job)}>
      <${Txt}>${heavy.job}<//></a> starts beside ${many(first.jobs.length - 1, 'other')}.</b>
      ${' '}<span class="t2">It takes longest of them, ${took(heavy.typical_ms)}.<${Jitter} name=${heavy.job}
        /></span></div></li>`}
  </ol>`;
}

/** There is this day: not 2026-99-99. */
const isDay = (text) => /^\d{4}-\d\d-\d\d$/.test(text || '') && date(new Date(`${text}T12:00`)) === text;

export function Load({ query }) {
  const phone = usePhone();
  const tomorrow = date(midnight(now(), 1));
  const chosen = isDay(query.day) ? query.day : tomorrow;
  const { data, error, again } = useLoaded((signal) => ask(`load?${new URLSearchParams({ day: chosen, tz: zone })}`, {
    signal }), [chosen]);
  const noon = new Date(`${chosen}T12:00`).getTime();
  const turn = (days) => setQuery({ day: date(noon + days * D) });
  useKeys('Load', { '←': ['day before', () => turn(-1)], '→': ['day after', () => turn(1)],
    'Tab, then arrows': ['from minute to minute; Enter opens the timeline', () => false] });
  const head = html`<span class="sp"></span><span class="seg" role="group" aria-label="Day"><button type="button"
    onClick=${() => turn(-1)} aria-label="Day before">←</button>
    <button type="button" aria-pressed="true" onClick=${() => setQuery({ day: '' })}>${chosen === tomorrow ? 'tomorrow'
      : day(noon, now())}</button><button type="button" onClick=${() => turn(1)}
        aria-label="Day after">→</button></span>`;
  if (!data) return html`<div class="hd"><h1>Load</h1>${head}</div>${error ? html`<${Failed} error=${error}
    again=${again} />` : html`<p class="sub">Asking …</p>`}`;
  const most = Math.max(...data.minutes);
  const sum = data.minutes.reduce((a, b) => a + b, 0);
  const full = data.minutes.indexOf(most);
  const start = Date.parse(data.from);
  return html`<div class="hd"><h1>${most > 1 ? `${number(most)} starts at ${clock(data,
    full)}` : sum ? 'No minute has two starts'
      : 'Nothing is planned on this day'}</h1>${head}</div>
  <p class="sub">Planned starts of ${day(noon, now())}, by minute, ${zoneName}. A minute of this day
    has <b>${(sum / data.minutes.length).toFixed(1)}</b> starts on average, the
      fullest <b>${number(most)}</b>; ${number(sum)} in all.</p>
  <div class="heat sec"><div><${Map} data=${data} most=${most} start=${start} phone=${phone} />
    <p class="legend">${STEPS.map((n) => html`<span key=${n}><i class="sw ac" ref=${(el) => el
      && el.style.setProperty('opacity', strength(n))}></i>${n}</span>`)}<span>starts in a
        minute, or more</span></p>
    <p class="t3">The stronger the colour of a minute, the more starts it has; one without colour has none, and a
      frame marks those that are crowded. A click on a minute opens the timeline there.</p></div>
    <div><h2 class="h2">What would help</h2><${Advice} data=${data} /><p class="t3 gap-s">Nothing here
      changes a schedule: copy a line into <code>jobs.toml</code>.</p></div></div>`;
}
