// The timeline: what happened at the same time? Past runs, running ones, and what is planned, by job or by instance.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from './base.js';
import { known, now, on, useTopics } from './store.js';
import { D, H, M, S, number, short, signed, when } from './format.js';
import { Icon } from './icons.js';
import { OUTCOMES, word } from './judge.js';
import { Failed, Held, Seg, Txt, say, tipAt, usePhone, useSeen } from './parts.js';
import { go, here, jobLink, setQuery } from './router.js';
import { useKeys } from './keys.js';
import { fit } from './canvas.js';
import { Data, fleetMarks } from './timeline_data.js';
import { ROW, drawGround, drawHead, drawInstance, drawJob, drawNow, lanes, tipOf } from './timeline_draw.js';

const HEAD = 62;
/** Also of one row alone, px. */
const LEAST_HIGH = 60;
const SPANS = [[H, '1 h'], [6 * H, '6 h'], [D, '24 h'], [7 * D, '7 d']];
const LEAST = 2 * M;
const MOST = 40 * D;
/** No time is later, Unix ms: the end of the year 9998. */
const LAST = Date.UTC(9999);
/** So much of the span lies behind now. */
const BEHIND = 2 / 3;

const spanOf = (z) => {
  const m = /^(\d+(?:\.\d+)?)(m|h|d)$/.exec(z || '');
  return m ? Math.max(LEAST, Math.min(MOST, Number(m[1]) * { m: M, h: H, d: D }[m[2]])) : 6 * H;
};
const minutes = (span) => Math.round(span / M) * M;
const zOf = (span) => (span % D === 0 ? `${span / D}d` : span % H === 0 ? `${span / H}h` : `${span / M}m`);

/** Where the window of time is. It follows the clock until somebody moves it. */
function windowOf(query) {
  const span = spanOf(query.z);
  const at = query.at ? Date.parse(query.at) : NaN;
  const given = at >= 0 && at < LAST;
  return { span, follow: !given, t0: given ? at - span / 2 : 0 };
}

function viewOf(win, w, h, phone) {
  const t = now();
  const t0 = win.follow ? t - win.span * BEHIND : win.t0;
  const lost = !known.link.up && !known.link.first;
  const x0 = phone ? 116 : 176;
  const plot = w - x0;
  return { t0, t1: t0 + win.span, span: win.span, now: t, seen: lost ? Math.min(t, known.asOf ?? t) : t, w, h, x0, plot, px: (x) => x0
    + ((x - t0) / win.span) * plot };
}

/** Drag, wheel and pinch. */
function pointers(el, move, zoom) {
  const down = new Map();
  let moved = 0;
  const start = (e) => {
    if (e.button > 0) return;
    down.set(e.pointerId, e.clientX);
    moved = 0;
  };
  const drag = (e) => {
    if (!down.has(e.pointerId)) return;
    const was = down.get(e.pointerId);
    if (down.size === 1) {
      moved += Math.abs(e.clientX - was);
      if (moved > 4) {
        el.setPointerCapture(e.pointerId);
        move(was - e.clientX);
        tipAt('');
      }
    } else {
      const other = [...down].find(([id]) => id !== e.pointerId)[1];
      const before = Math.abs(was - other);
      const after = Math.abs(e.clientX - other);
      if (before > 10 && after > 10) zoom(before / after, (e.clientX + other) / 2);
      moved = 99;
    }
    down.set(e.pointerId, e.clientX);
  };
  const end = (e) => down.delete(e.pointerId);
  const wheel = (e) => {
    const side = e.shiftKey ? e.deltaY || e.deltaX : Math.abs(e.deltaX) > Math.abs(e.deltaY) ? e.deltaX : 0;
    if (e.ctrlKey || e.metaKey) zoom(1.0015 ** e.deltaY, e.clientX);
    else if (side) move(side);
    else return;
    e.preventDefault();
  };
  const list = { pointerdown: start, pointermove: drag, pointerup: end, pointercancel: end };
  for (const [k, f] of Object.entries(list)) el.addEventListener(k, f);
  el.addEventListener('wheel', wheel, { passive: false });
  return { dragged: () => moved > 4 };
}

const Legend = () => html`<p class="legend">${['running', ...OUTCOMES].map((k) => html`<span key=${k}>
    <${Icon} k=${k} />${word(k)}</span>`)}
  <span><i class="sw plan"></i>planned, as long as typical</span><span><i class="sw out"></i>store or instance out of
    reach</span></p>`;

/** What is drawn, apart from the components: it changes with each frame. */
function useChart(phone, query, rows, tops, by, changed) {
  const refs = { wrap: useRef(), head: useRef(), body: useRef(), canvas: useRef() };
  const s = useRef(null);
  s.current ??= { win: windowOf(query), hits: [], headHits: [], frame: 0, data: null, lane: new Map(), sel: null };
  const c = s.current;
  Object.assign(c, { rows, tops, by, phone });
  c.draw = () => {
    if (c.frame) return;
    c.frame = requestAnimationFrame(() => {
      c.frame = 0;
      if (refs.canvas.current) paint(c, refs);
    });
  };
  c.data ??= new Data(changed);
  c.move = (pixels) => shift(c, pixels);
  c.zoom = (factor, x) => scale(c, refs, factor, x);
  return [c, refs];
}

function paint(c, refs) {
  const w = refs.wrap.current.clientWidth;
  const body = refs.body.current.getBoundingClientRect();
  const room = innerHeight - 48 - HEAD - (c.phone ? 62 : 36);
  const h = Math.max(LEAST_HIGH, Math.min(c.tops[c.tops.length - 1], room));
  const v = viewOf(c.win, w, h, c.phone);
  c.view = v;
  const fleet = fleetMarks();
  c.headHits = [];
  drawHead(fit(refs.head.current, w, HEAD), v, fleet, c.headHits);
  const ctx = fit(refs.canvas.current, w, h);
  const scrolled = refs.canvas.current.getBoundingClientRect().top - body.top;
  c.scrolled = scrolled;
  c.hits = [];
  drawGround(ctx, v, fleet);
  const seen = [];
  for (let i = 0; i < c.rows.length; i++) {
    const top = c.tops[i] - scrolled;
    if (top > h) break;
    if (top < -(c.tops[i + 1] - c.tops[i])) continue;
    if (c.by === 'jobs') {
      seen.push(c.rows[i]);
      drawJob(ctx, v, c.rows[i], c.data.row(c.rows[i]), top, c.hits);
    } else drawInstance(ctx, v, c.rows[i], c.lane.get(c.rows[i].instance), top, c.tops[i + 1] - c.tops[i], fleet,
      c.hits);
  }
  drawNow(ctx, v);
  if (c.sel) ring(ctx, c);
  c.seen = seen;
  // Also if it is drawn in each frame.
  c.later ??= setTimeout(() => {
    c.later = null;
    const { t0, t1 } = c.view;
    if (c.by === 'jobs') c.data.want(c.seen, t0, t1);
    else c.data.all(t0, t1);
  }, 120);
}

function ring(ctx, c) {
  const hit = c.hits.find((x) => x.job === c.sel.job && x.o === c.sel.o);
  if (!hit) return;
  ctx.strokeStyle = getComputedStyle(document.documentElement).color;
  ctx.lineWidth = 2;
  ctx.strokeRect(hit.x - 1, hit.y - 1, hit.w + 2, hit.h + 2);
}

function save(c) {
  clearTimeout(c.saving);
  c.saving = setTimeout(() => {
    if (here().screen !== 'timeline') return;
    setQuery({ z: zOf(minutes(c.win.span)), at: c.win.follow ? '' : new Date(Math.round((c.win.t0
      + c.win.span / 2) / 1000) * 1000).toISOString() });
  }, 300);
}

/** The middle of a window is a time that an address can have. */
const within = (t0, span) => Math.max(-span / 2, Math.min(LAST - S - span / 2, t0));

/** The window as it is now: several keys or movements may come between two frames. */
const viewNow = (c) => c.view && viewOf(c.win, c.view.w, c.view.h, c.phone);

function shift(c, pixels) {
  const v = viewNow(c);
  if (!v) return;
  c.win = { ...c.win, follow: false, t0: within(v.t0 + (pixels / v.plot) * v.span, v.span) };
  save(c);
  c.draw();
}

function scale(c, refs, factor, x) {
  const v = viewNow(c);
  if (!v) return;
  const span = Math.max(LEAST, Math.min(MOST, v.span * factor));
  const left = refs.wrap.current.getBoundingClientRect().left;
  const at = x == null ? (c.win.follow ? v.now : v.t0 + v.span / 2) : v.t0 + ((x - left - v.x0) / v.plot) * v.span;
  c.win = { span, follow: c.win.follow && x == null, t0: within(at - ((at - v.t0) / v.span) * span, span) };
  save(c);
  c.draw();
}

/** Goes from run to run with the arrows, once the chart has the focus. */
function walk(c, refs, e) {
  const hits = c.hits.filter((x) => x.r);
  if (e.key === 'Enter' && c.sel) return go(jobLink(c.sel.job, c.sel.o));
  if (!e.key.startsWith('Arrow') || !hits.length) return undefined;
  e.preventDefault();
  e.stopPropagation();
  const rows = [...new Set(hits.map((x) => Math.round(x.y)))].sort((a, b) => a - b);
  const cur = c.sel && hits.find((x) => x.job === c.sel.job && x.o === c.sel.o);
  let to;
  if (!cur) to = hits[hits.length - 1];
  else if (e.key === 'ArrowLeft' || e.key === 'ArrowRight') {
    const mine = hits.filter((x) => Math.abs(x.y - cur.y) < 2).sort((a, b) => a.x - b.x);
    to = mine[mine.indexOf(cur) + (e.key === 'ArrowLeft' ? -1 : 1)];
  } else {
    const row = rows[rows.findIndex((y) => Math.abs(y - cur.y) < 2) + (e.key === 'ArrowUp' ? -1 : 1)];
    const there = hits.filter((x) => Math.abs(x.y - row) < 2);
    to = there.sort((a, b) => Math.abs(a.x - cur.x) - Math.abs(b.x - cur.x))[0];
  }
  if (!to) return undefined;
  c.sel = { job: to.job, o: to.o };
  say(tipOf(to));
  const box = refs.canvas.current.getBoundingClientRect();
  tipAt(tipOf(to), box.left + to.x + to.w / 2, box.top + to.y, to.h);
  c.draw();
  return undefined;
}

function useRows(by, q) {
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  if (by === 'instances') return known.instances?.instances || [];
  return [...known.jobs.values()].filter((j) => words.every((w) =>
    `${j.job} ${j.tags.join(' ')}`.toLowerCase().includes(w))).map((j) => j.job);
}

function Labels({ rows, by, tops, from, to }) {
  return rows.slice(from, to).map((row, i) => {
    const top = { top: `${tops[from + i]}px` };
    if (by === 'jobs') {
      const state = known.states.get(row);
      return html`<a key=${row} class="tl-n" href=${jobLink(row)} style=${top}><span
        data-tip=${word(state?.key)}><${Icon} k=${state?.icon} label=${word(state?.key)} /></span>
        <${Txt}>${row}<//></a>`;
    }
    return html`<div key=${row.instance} class="tl-n inst" style=${top}><a href="#/instances"
      class="b"><${Txt}>${short(row.instance)}<//></a>
      <span class="t3">${row.silent ? 'not heard from' : row.draining ? 'draining'
        : `offset ${signed(Number(row.clock_offset_ms.toFixed(1)))} ms`}</span></div>`;
  });
}

/** What else makes it draw: the clock, the window, the theme, the pointer. */
function useListening(c, refs) {
  useEffect(() => {
    const grab = pointers(refs.wrap.current, c.move, c.zoom);
    c.dragged = grab.dragged;
    const redraw = () => c.draw();
    const off = on('tick', redraw);
    for (const k of ['scroll', 'resize', 'themechange']) addEventListener(k, redraw, { passive: true });
    const dark = matchMedia('(prefers-color-scheme:dark)');
    dark.addEventListener('change', redraw);
    return () => {
      off();
      dark.removeEventListener('change', redraw);
      for (const k of ['scroll', 'resize', 'themechange']) removeEventListener(k, redraw);
      c.data.stop.abort();
      clearTimeout(c.later);
      clearTimeout(c.saving);
    };
  }, []);
}

/** Shows what lies under the pointer, and opens it. */
function pointing(c, refs) {
  const find = (e) => {
    const inHead = e.target === refs.head.current;
    const box = e.target.getBoundingClientRect();
    const [x, y] = [e.clientX - box.left, e.clientY - box.top];
    const hit = (inHead ? c.headHits : c.hits).findLast((r) => x >= r.x && x <= r.x + r.w && y >= r.y && y <= r.y
      + r.h);
    return { hit, box };
  };
  const point = (e) => {
    if (e.buttons) return;
    const { hit, box } = find(e);
    e.target.style.cursor = hit?.job ? 'pointer' : '';
    tipAt(hit ? tipOf(hit) : '', hit ? box.left + Math.max(hit.x, Math.min(e.clientX - box.left, hit.x + hit.w)) : 0,
      hit ? box.top + hit.y : 0, hit?.h);
  };
  const open = (e) => {
    const { hit } = find(e);
    if (hit?.job && !c.dragged()) go(jobLink(hit.job, hit.o));
  };
  return { point, open };
}

export function Timeline({ query }) {
  useTopics('jobs', 'instances', 'feed', 'link');
  const phone = usePhone();
  const by = query.by === 'instances' ? 'instances' : 'jobs';
  const [laid, setLaid] = useState(0);
  const rows = useRows(by, query.q || '');
  const lane = useRef(new Map());
  const heights = rows.map((row) => (by === 'jobs' ? ROW : Math.max(4, lane.current.get(row.instance)?.ends.length || 0)
    * 13 + 24));
  const tops = useMemo(() => {
    const all = [0];
    for (const high of heights) all.push(all[all.length - 1] + high);
    return all;
  }, [heights.join()]);
  const [c, refs] = useChart(phone, query, rows, tops, by, () => setLaid((n) => n + 1));
  const [from, to] = useSeen(tops, refs.body);
  // The address was changed from outside, as by a link or the palette.
  useEffect(() => {
    const win = windowOf(query);
    // It has whole minutes and seconds.
    if (win.span !== minutes(c.win.span) || win.follow !== c.win.follow || (!win.follow
      && Math.abs(win.t0 + win.span / 2 - c.win.t0 - c.win.span / 2) > 2000)) c.win = win;
    c.draw();
  }, [query.z, query.at]);
  useLayoutEffect(() => {
    if (by === 'instances' && c.view) {
      const { t0, t1, span, plot } = c.view;
      // What events have told since. A tab that nobody sees does not draw.
      c.data.forget(t0, t1);
      for (const name of new Set([...known.jobs.keys(), ...c.data.rows.keys()])) c.data.row(name);
      lane.current = c.lane = lanes(c.data.rows.values(), t0 - span / 2, t1 + span / 2, (3.5 / plot) * span);
      const high = [...lane.current].map(([name, l]) => name + l.ends.length).join();
      if (high !== c.high) {
        c.high = high;
        setLaid(laid + 1);
      }
    }
    c.draw();
  });
  useListening(c, refs);
  const { point, open } = pointing(c, refs);
  const toNow = () => {
    c.win = { ...c.win, follow: true };
    save(c);
    c.draw();
  };
  const pan = (share) => () => c.move(share * (c.view?.plot || 0));
  useKeys('Timeline', {
    '←': ['earlier', pan(-0.2)], '→': ['later', pan(0.2)], '+': ['closer', () => c.zoom(0.5)], '-': ['farther', () =>
      c.zoom(2)], '=': ['closer', () => c.zoom(0.5)],
    n: ['now', toNow], b: ['by jobs or by instances', () => setQuery({ by: by === 'jobs' ? 'instances' : '' })],
      '/': ['filter', () => document.querySelector('#filter')?.focus()],
    'Tab, then arrows': ['from run to run in the chart; Enter opens one', () => false],
  });
  const pick = (span) => {
    c.win = { ...c.win, span, t0: c.view ? c.view.t0 + c.view.span / 2 - span / 2 : 0 };
    save(c);
    c.draw();
    setLaid(laid + 1);
  };
  const v = c.view || viewOf(c.win, 1000, 0, phone);
  const words = `Runs by ${by} from ${when(Math.floor(v.t0 / M) * M, now())} to ${when(Math.floor(v.t1 / M) * M,
    now())}. Arrow keys go from run to run, Enter opens one.`;
  return html`<div class="hd"><h1>Timeline</h1>${by === 'jobs' && html`<input type="search" class="in" id="filter"
    placeholder="Filter jobs" aria-label="Filter jobs by name or tag"
      value=${query.q || ''} onInput=${(e) => setQuery({ q: e.target.value })} onKeyDown=${(e) => e.key === 'Escape'
        && e.target.blur()} />`}<span class="sp"></span>
    <${Seg} label="Rows" list=${[['jobs', 'Jobs'], ['instances', 'Instances']]} value=${by} onPick=${(k) => setQuery({
      by: k === 'jobs' ? '' : k })} />
    <${Seg} label="Zoom" list=${SPANS} value=${minutes(c.win.span)} onPick=${pick} /><button type="button" class="btn"
      onClick=${toNow}>Now</button></div>
  <${Held} />${c.data.error && html`<${Failed} error=${c.data.error} />`}
  ${c.data.lacks(by === 'jobs' ? rows : null, v.t0) && html`<p class="note t2"><${Icon} k="slow" />There were more runs
    than can be shown: the oldest of this span are left out. Zoom in${by === 'jobs' ? ', or filter' : ''}.</p>`}
  <div class="tl" ref=${refs.wrap} tabindex="0" role="group" aria-label=${words} onPointerMove=${point}
    onPointerLeave=${() => tipAt('')} onClick=${open}
    onKeyDown=${(e) => e.target === refs.wrap.current && walk(c, refs, e)} onBlur=${() => { c.sel = null; c.draw(); }}>
    <canvas class="tl-head" ref=${refs.head} aria-hidden="true"></canvas>
    <div class="tl-body" ref=${refs.body} style=${{ height: `${Math.max(LEAST_HIGH,
      tops[tops.length - 1])}px` }}><canvas ref=${refs.canvas}
      aria-hidden="true"></canvas>
      <${Labels} rows=${rows} by=${by} tops=${tops} from=${from} to=${to} /></div></div>
  ${!rows.length && html`<p class="none">${by === 'jobs' ? !known.jobs.size ? 'There are no jobs yet.' : html`No job matches “<${Txt}>${query.q}<//>”. <button
    type="button" class="btn s" onClick=${() => setQuery({ q: '' })}>Show all ${number(known.jobs.size)}</button>`
    : 'No instance is known.'}</p>`}
  ${by === 'instances' && html`<p class="more">Who runs what comes is decided at each instant.</p>`}<${Legend} />`;
}
