// Charts of a job's runs: dots over time on a band of 5 % to 95 %, with the median. uPlot draws the axes.
import { html, useEffect, useRef, useState } from './base.js';
import { D, H, M, S, chosen, day, hm, hms, ms, took } from './format.js';
import { BAD } from './judge.js';
import { runWords, say, tipAt } from './parts.js';

let loading = null;
/** uPlot is a classic script; it is loaded when the first chart is drawn. */
function uplot() {
  loading ??= new Promise((done, fail) => {
    const add = (tag, set) => document.head.append(Object.assign(document.createElement(tag), set));
    add('link', { rel: 'stylesheet', href: 'static/vendor/uplot.css' });
    add('script', { src: 'static/vendor/uplot.js', onload: () => done(window.uPlot), onerror: () =>
      fail(new Error('uplot.js')) });
  });
  return loading;
}

/** The middle one; of two middle ones, their mean. */
export function median(sorted) {
  const half = sorted.length / 2;
  return sorted.length ? (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2 : null;
}
export function quantile(sorted, p) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(p * sorted.length))] : null;
}
const colour = (name) => {
  const probe = document.createElement('i');
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
};
const HUE = { succeeded: 'ok', running: 'run', unknown: 'lost', lease_lost: 'lost', missed: 'warn' };
export const hueOf = (outcome) => HUE[outcome] || (BAD.includes(outcome) ? 'bad' : 'off');

/** Steps that people count durations in. */
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, S, 2 * S, 5 * S, 10 * S, 30 * S, M, 2 * M, 5 * M, 10 * M, 15 * M,
  30 * M, H, 2 * H, 6 * H, 24 * H];
function splits(low, high, log) {
  if (log) {
    const all = [];
    for (let t = 1; t <= high; t *= 10) for (const k of [1, 2, 5]) if (t * k >= low && t * k <= high) all.push(t * k);
    const some = all.length > 6 ? all.filter((t) => /^1/.test(t)) : all;
    return low > 0 ? some : [0, ...some.filter((t) => t > 1 || high < 5)];
  }
  const step = STEPS.find((s) => high / s <= 4) ?? Math.ceil(high / 4 / H) * H;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, k) => k * step);
}

/** Labels of the axis of time: the day where it changes, else the time. */
function instants(list) {
  const far = list.length > 1 && (list[1] - list[0]) * S >= D / 2;
  let last = null;
  return list.map((t) => {
    const d = day(t * S, Date.now());
    const fine = list.length > 1 && (list[1] - list[0]) * S < M;
    const time = (fine ? hms : hm)(t * S);
    // A day alone among few labels would say too little.
    const is = far ? d : d === last ? time : list.length < 3 ? `${d} ${time}` : d;
    last = d;
    return is;
  });
}

function mark(ctx, outcome, x, y, r) {
  ctx.beginPath();
  if (outcome === 'succeeded' || outcome === 'running') {
    ctx.arc(x, y, r, 0, 7);
    ctx.fill();
  } else if (BAD.includes(outcome)) {
    ctx.moveTo(x - r * 1.3, y - r * 1.3);
    ctx.lineTo(x + r * 1.3, y + r * 1.3);
    ctx.moveTo(x + r * 1.3, y - r * 1.3);
    ctx.lineTo(x - r * 1.3, y + r * 1.3);
    ctx.lineWidth = r * 0.8;
    ctx.stroke();
  } else {
    ctx.rect(x - r, y - r, 2 * r, 2 * r);
    ctx.lineWidth = r * 0.6;
    ctx.stroke();
  }
}

/** Draws what uPlot does not know: the band, the median, and a mark for each outcome. */
function paint(u, now) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio || 1;
  const y = (v) => u.valToPos(v, 'y', true);
  const { items, values, q, selected } = now;
  ctx.save();
  ctx.fillStyle = colour('ok');
  ctx.globalAlpha = 0.1;
  if (q.n > 4) ctx.fillRect(bbox.left, y(q.high), bbox.width, Math.max(1, y(q.low) - y(q.high)));
  ctx.globalAlpha = 1;
  ctx.strokeStyle = colour('ok');
  ctx.lineWidth = 1.2 * ratio;
  ctx.setLineDash([4 * ratio, 3 * ratio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y(q.median));
  ctx.lineTo(bbox.left + bbox.width, y(q.median));
  ctx.stroke();
  ctx.setLineDash([]);
  const colours = {};
  items.forEach((item, i) => {
    const hue = hueOf(item.outcome);
    ctx.fillStyle = ctx.strokeStyle = colours[hue] ??= colour(hue);
    const [x, py] = [u.valToPos(ms(item.occurrence) / 1000, 'x', true), y(values[i])];
    mark(ctx, item.outcome, x, py, 2.6 * ratio);
    if (ms(item.occurrence) === selected) {
      ctx.strokeStyle = colour('ac');
      ctx.lineWidth = 1.6 * ratio;
      ctx.beginPath();
      ctx.arc(x, py, 7 * ratio, 0, 7);
      ctx.stroke();
    }
  });
  ctx.restore();
}

/** From the first to the last run, and a minute at least: around one run alone the library would show years. */
const span = ({ data: [at] }) => {
  const [from, to] = [at[0] ?? 0, at[at.length - 1] ?? 0];
  return to - from >= 60 ? [from, to] : [from - 30, to + 30];
};

function options(now, log, width) {
  const axis = { stroke: () => colour('tx3'), font: '11px system-ui', grid: { stroke: () => colour('line'), width: 1 },
    ticks: { show: false } };
  const { values } = now.current;
  const high = Math.max(...values) * (log ? 1.3 : 1.08);
  const least = Math.min(...values);
  const low = log && least > 1 ? least * 0.7 : 0;
  return {
    width, height: 150, legend: { show: false },
    cursor: { points: { show: false }, drag: { x: false, y: false }, y: false, x: false },
    scales: { x: { time: true, range: span },
      // A logarithm of which 0 is part, too.
      y: { distr: log ? 4 : 1, asinh: 1, range: () => [low, Math.max(high, low * 2, 1)] } },
    axes: [{ ...axis, size: 26, space: 110, grid: { show: false }, values: (u, list) => instants(list) },
      { ...axis, size: 68, splits: (u, i, a, b) => splits(a, b, log), filter: (u, list) => list, values: (u, list) =>
        list.map((v) => (v ? chosen(v) : '0')) }],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: { draw: [(u) => paint(u, now.current)] },
  };
}

/** `value` of each of `items` (occurrences, oldest first) over time; `onPick` opens one. */
export function Chart({ job, label, items: all, value, log, selected, onPick }) {
  const items = all.filter((i) => value(i) != null);
  const values = items.map((i) => value(i));
  const usual = items.filter((i) => i.outcome === 'succeeded').map((i) => value(i)).sort((a, b) => a - b);
  const sorted = usual.length ? usual : [...values].sort((a, b) => a - b);
  const q = { n: sorted.length, median: median(sorted), low: quantile(sorted, 0.05), high: quantile(sorted, 0.95),
    most: Math.max(0, ...values) };
  const box = useRef();
  const plot = useRef();
  const now = useRef();
  const [at, setAt] = useState(-1);
  now.current = { items, values, q, selected };
  const key = items.map((i) => [i.occurrence, i.outcome, value(i)]).join();
  useEffect(() => {
    if (!items.length) return undefined;
    let gone = false;
    const make = async () => {
      const U = await uplot();
      if (gone || !box.current) return;
      plot.current?.destroy();
      const xs = items.map((i) => ms(i.occurrence) / 1000);
      plot.current = new U(options(now, log, box.current.clientWidth), [xs, values], box.current);
      const { over } = plot.current;
      const near = () => now.current.items[plot.current.cursor.idx];
      over.addEventListener('pointermove', () => point(plot.current.cursor.idx));
      over.addEventListener('pointerleave', () => tipAt(''));
      over.addEventListener('click', () => near() && onPick(ms(near().occurrence)));
    };
    make();
    const size = new ResizeObserver(() => box.current && plot.current?.setSize({ width: box.current.clientWidth, height: 150 }));
    size.observe(box.current);
    const scheme = matchMedia('(prefers-color-scheme:dark)');
    scheme.addEventListener('change', make);
    addEventListener('themechange', make);
    return () => {
      gone = true;
      size.disconnect();
      scheme.removeEventListener('change', make);
      removeEventListener('themechange', make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [key]);
  useEffect(() => plot.current?.redraw(false), [selected]);
  function point(i) {
    const item = now.current.items[i];
    if (!item || !plot.current) return tipAt('');
    const rect = plot.current.over.getBoundingClientRect();
    const x = rect.left + plot.current.valToPos(ms(item.occurrence) / 1000, 'x');
    tipAt(runWords(job, item), x, rect.top + plot.current.valToPos(now.current.values[i], 'y') - 6, 12);
    return item;
  }
  const step = (e) => {
    const to = { ArrowLeft: at < 0 ? items.length - 1 : at - 1, ArrowRight: at + 1, Home: 0,
      End: items.length - 1 }[e.key];
    if (e.key === 'Enter' && items[at]) onPick(ms(items[at].occurrence));
    if (to == null) return;
    e.preventDefault();
    e.stopPropagation();
    const i = Math.max(0, Math.min(items.length - 1, to));
    setAt(i);
    point(i);
    say(runWords(job, items[i]));
  };
  const words = items.length ? `median ${took(q.median)}, 95 % under ${took(q.high)}, most ${took(q.most)}`
    : 'nothing yet';
  return html`<div><h2 class="h2">${label}<small>${words}</small></h2>
    ${items.length > 0 && html`<div class="plot" ref=${box} tabindex="0" role="group" onKeyDown=${step} onBlur=${() =>
      tipAt('')} aria-label=${`${label} of ${items.length} runs: ${words}. Arrow keys go from run to run.`}></div>`}</div>`;
}
