// Draws the timeline on its canvases, and remembers what lies where, so that it can be pointed at.
import { known, now } from './store.js';
import { D, H, M, clean, day, hm, hms, lasting, midnight, ms, weekday, when } from './format.js';
import { BAD, word, worst } from './judge.js';
import { colours, hatched, hue, line, sign } from './canvas.js';
import { runWords } from './parts.js';
import { within } from './timeline_data.js';

export const ROW = 30;
const BAR = 12;
/** Narrower than this and bars would touch: then cells. */
const CELL = 6;

const STEPS = [M, 2 * M, 5 * M, 10 * M, 15 * M, 30 * M, H, 2 * H, 3 * H, 6 * H, 12 * H, D, 2 * D, 7 * D];

/** Instants of the axis, on round local times. */
function ticks(v) {
  const step = STEPS.find((s) => (s / v.span) * v.plot > 62) ?? 14 * D;
  const list = [];
  if (step < D) {
    let start = midnight(v.t0);
    for (let t = start; t < v.t1; t += step) {
      // Each day begins anew at its midnight, because not every day has 24 hours.
      const next = midnight(start, 1);
      if (t >= next) [start, t] = [next, next];
      if (t >= v.t0) list.push(t);
    }
  } else for (let k = 0, t = midnight(v.t0); t < v.t1; t = midnight(v.t0,
    ++k * Math.round(step / D))) if (t >= v.t0) list.push(t);
  return list;
}

/** The head: what happened to the fleet, and the axis. */
export function drawHead(ctx, v, fleet, hits) {
  const c = colours();
  ctx.fillStyle = c.tx3;
  ctx.textAlign = 'left';
  ctx.fillText('Fleet', 0, 18);
  for (const b of fleet.bands) {
    const [x, w] = clip(v, b.from, b.to ?? v.now);
    if (w > 0) {
      ctx.fillStyle = c.bad;
      ctx.fillRect(x, 31, w, 3);
    }
  }
  line(ctx, 0, 34.5, v.w, 34.5, c.line);
  const ends = [0, 0];
  for (const m of fleet.marks) {
    const x = v.px(m.at);
    if (x < v.x0 || x > v.w) continue;
    const text = clean(m.text);
    const k = x > ends[0] ? 0 : x > ends[1] ? 1 : -1;
    const wide = ctx.measureText(text).width;
    if (k >= 0) ends[k] = x + wide + 22;
    // Without room for its text it stands on the axis, clear of the texts of others.
    const y = [13, 25][k] ?? 34;
    ctx.fillStyle = m.bad ? c.bad : c.tx3;
    ctx.beginPath();
    ctx.moveTo(x, y - 4);
    ctx.lineTo(x + 4, y);
    ctx.lineTo(x, y + 4);
    ctx.lineTo(x - 4, y);
    ctx.fill();
    ctx.fillStyle = m.bad ? c['bad-t'] : c.tx2;
    if (k >= 0) ctx.fillText(text, x + 8, y + 4);
    hits.push({ x: x - 5, y: y - 6, w: k >= 0 ? wide + 16 : 10, h: 12, tip: `${hms(m.at)}  ${text}${m.detail
      ? `\n${clean(m.detail)}` : ''}` });
  }
  ctx.textAlign = 'center';
  const nx = v.px(v.now);
  for (const t of ticks(v)) {
    const x = v.px(t);
    if (Math.abs(x - nx) < 50) continue;
    const first = midnight(t) === t;
    ctx.fillStyle = first ? c.tx2 : c.tx3;
    if (x > v.x0 + 16 && x < v.w - 18) ctx.fillText(first ? (v.span > 3 * D ? day(t, v.now)
      : `${weekday(t)} ${new Date(t).getDate()}`) : hm(t), x, 52);
  }
  if (nx > v.x0 && nx < v.w) {
    ctx.fillStyle = c.ac;
    ctx.font = `600 11px ${c.font}`;
    ctx.fillText(hms(v.now), Math.min(nx, v.w - 26), 52);
    ctx.font = `11px ${c.font}`;
  }
}

function clip(v, from, to) {
  const x = Math.max(v.x0, v.px(from));
  return [x, Math.min(v.w, v.px(to)) - x];
}

/** The ground: what is ahead, the axis' lines, outages. */
export function drawGround(ctx, v, fleet) {
  const c = colours();
  const nx = Math.max(v.x0, v.px(v.now));
  ctx.fillStyle = c.sunk;
  if (nx < v.w) ctx.fillRect(nx, 0, v.w - nx, v.h);
  for (const t of ticks(v)) if (v.px(t) > v.x0) line(ctx, Math.round(v.px(t)) + 0.5, 0, Math.round(v.px(t)) + 0.5, v.h,
    c.line);
  for (const b of fleet.bands) {
    if (b.instance) continue;
    const [x, w] = clip(v, b.from, b.to ?? v.now);
    if (w > 0) hatched(ctx, x, 0, Math.max(2, w), v.h, c.bad);
  }
  // What happened since, this page has not heard.
  const [x, w] = clip(v, v.seen, v.now);
  if (w > 0) hatched(ctx, x, 0, w, v.h, c.off);
}

export function drawNow(ctx, v) {
  const x = v.px(v.now);
  if (x > v.x0 && x < v.w) line(ctx, x, 0, x, v.h, colours().ac, 1.5);
}

const triangle = (ctx, x, y, colour) => {
  ctx.fillStyle = colour;
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x + 4, y + 5);
  ctx.lineTo(x - 4, y + 5);
  ctx.fill();
};

/** One attempt. A bad end has a stop and its sign inside, or a triangle below where there is no room. */
export function drawRun(ctx, v, r, y, h, hits) {
  const c = colours();
  const end = r.e ?? Math.max(r.s, v.seen);
  const x = Math.max(v.x0, v.px(r.s));
  const w = Math.max(2.5, Math.min(v.w, v.px(end)) - x);
  if (v.px(end) < v.x0 || x > v.w) return;
  const colour = c[hue(r.outcome)];
  if (r.outcome === 'skipped') line(ctx, x + 0.5, y - 2, x + 0.5, y + h + 2, colour, 2);
  else if (r.outcome === 'missed') {
    ctx.fillStyle = c.bg;
    ctx.fillRect(x, y, Math.max(7, w), h);
    ctx.strokeStyle = colour;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x + 0.75, y + 0.75, Math.max(7, w), h - 1.5);
    triangle(ctx, x + 4, y + h + 2, colour);
  } else {
    ctx.fillStyle = colour;
    ctx.beginPath();
    ctx.roundRect(x, y, w, h, Math.min(2, w / 2));
    ctx.fill();
    const typical = r.e == null && known.jobs.get(r.job)?.typical_ms;
    if (typical && v.px(r.s + typical) > x + w) {
      ctx.globalAlpha = 0.2;
      ctx.fillRect(x + w, y, v.px(r.s + typical) - x - w, h);
      ctx.globalAlpha = 1;
    }
    if (BAD.includes(r.outcome)) {
      ctx.fillRect(x + w - 1.5, y - 3, 2.5, h + 6);
      if (w > 14) sign(ctx, r.outcome, x + w / 2 - 5, y + h / 2 - 5, 10, c.bg);
      else triangle(ctx, x + w / 2, y + h + 2, colour);
    }
    if (r.trigger === 'takeover' && v.px(r.s) > v.x0) {
      ctx.strokeStyle = c.tx2;
      ctx.lineWidth = 1.6;
      ctx.beginPath();
      ctx.moveTo(x - 7, y + h / 2 - 4);
      ctx.lineTo(x - 2.5, y + h / 2);
      ctx.lineTo(x - 7, y + h / 2 + 4);
      ctx.stroke();
    }
  }
  hits.push({ x: x - 2, y: y - 3, w: Math.max(8, w + 4), h: h + 6, r, job: r.job, o: r.o, seen: v.seen });
}

/** Many runs in few pixels: cells of equal width, each with the worst outcome in it. */
function drawCells(ctx, v, list, y, hits) {
  const c = colours();
  const cells = new Map();
  for (const r of list) {
    const k = Math.max(0, Math.floor((v.px(r.s) - v.x0) / CELL));
    if (!cells.has(k)) cells.set(k, []);
    cells.get(k).push(r);
  }
  for (const [k, rs] of cells) {
    const x = v.x0 + k * CELL;
    const w = worst(rs.map((r) => r.outcome));
    const it = rs.find((r) => r.outcome === w);
    const goOn = rs.filter((r) => r.outcome === 'running').length;
    const not = rs.filter((r) => r.outcome !== 'succeeded').length - goOn;
    ctx.fillStyle = c[hue(w)];
    ctx.globalAlpha = w === 'succeeded' ? 0.6 : 1;
    ctx.fillRect(x, not ? y : y + 3, CELL - 1, not ? BAR : BAR - 6);
    ctx.globalAlpha = 1;
    if (BAD.includes(w) || w === 'missed') triangle(ctx, x + 2.5, y + BAR + 2, c[hue(w)]);
    const tip = rs.length > 1 && `${it.job} · ${when(rs[0].o, v.now)} to ${when(rs[rs.length - 1].o,
      v.now)}\n${rs.length} runs, ${
      not ? `not succeeded: ${not} (worst ${word(w)})` : goOn ? `${goOn} of them running` : 'all succeeded'}`;
    hits.push({ x, y: y - 3, w: CELL, h: BAR + 6, r: it, job: it.job, o: it.o, tip, seen: v.seen });
  }
}

function drawPlan(ctx, v, job, row, y) {
  const c = colours();
  ctx.fillStyle = c.off;
  ctx.globalAlpha = 0.28;
  const long = job.typical_ms ?? 0;
  // What is planned before that will not run.
  const from = Math.max(v.now, ms(job.next));
  if (row.dense) {
    for (let x = Math.max(v.x0, v.px(from)); x < v.w; x += CELL) ctx.fillRect(x, y + 3, CELL - 1, BAR - 6);
  } else {
    let end = -1;
    for (const t of row.plan) {
      if (t < from || t > v.t1) continue;
      const x = Math.max(v.x0, v.px(t));
      if (x < end) continue;
      const w = Math.max(2.5, v.px(t + long) - v.px(t));
      ctx.beginPath();
      ctx.roundRect(x, y, Math.min(w, v.w - x), BAR, 2);
      ctx.fill();
      end = x + Math.min(w, CELL);
    }
  }
  ctx.globalAlpha = 1;
}

/** Lines between the attempts of one occurrence, and the retry ahead. */
function drawLinks(ctx, v, job, list, y) {
  const c = colours();
  const my = y + BAR / 2;
  const ends = new Map();
  for (const r of list) {
    const before = ends.get(r.o);
    if (before != null && v.px(r.s) > v.x0) line(ctx, Math.max(v.x0, v.px(before)), my, v.px(r.s), my, c.tx3, 1.2);
    ends.set(r.o, r.e ?? v.now);
  }
  for (const a of job.awaited) {
    const x = v.px(ms(a.at));
    if (x < v.x0 || x > v.w) continue;
    const from = ends.get(ms(a.occurrence)) ?? ms(a.occurrence);
    line(ctx, Math.max(v.x0, v.px(from)), my, x, my, c.tx3, 1.2, [3, 3]);
    ctx.strokeStyle = c.bad;
    ctx.setLineDash([3, 2]);
    ctx.strokeRect(x + 0.5, y + 0.5, Math.max(6, v.px(ms(a.at) + (job.typical_ms || 0)) - x), BAR - 1);
    ctx.setLineDash([]);
  }
}

/** When the job runs next, if that is beyond the right edge. Returns where these words begin. */
function drawNext(ctx, v, job, top) {
  const next = ms(job.next);
  if (!(next > v.t1 && v.t1 > v.now)) return v.w;
  const words = `${v.w < 700 ? '' : `next ${when(next, v.now)} `}→`;
  ctx.fillStyle = colours().tx3;
  ctx.textAlign = 'right';
  ctx.fillText(words, v.w - 6, top + 19);
  return v.w - 12 - ctx.measureText(words).width;
}

export function drawJob(ctx, v, name, row, top, hits) {
  const c = colours();
  const job = known.jobs.get(name);
  if (!job) return;
  const y = top + 9;
  line(ctx, v.x0, top + ROW - 0.5, v.w, top + ROW - 0.5, c.line);
  const end = drawNext(ctx, v, job, top);
  if (job.paused) {
    const [x, w] = clip(v, ms(job.paused.since), ms(job.paused.until) ?? v.t1);
    const to = Math.min(x + w, end);
    if (to > x) line(ctx, x, y + BAR / 2, to, y + BAR / 2, c.off, 2, [1, 5]);
  }
  const list = within(row.sorted, v.t0, v.t1);
  if (job.next && v.t1 > v.now) drawPlan(ctx, v, job, row, y);
  const first = Math.min(...list.map((r) => r.s));
  if (list.length > 20 && list.length * (CELL - 1) > v.px(Math.min(v.t1, v.now)) - v.px(Math.max(v.t0,
    first))) drawCells(ctx, v, list, y, hits);
  else {
    drawLinks(ctx, v, job, list, y);
    for (const r of list) drawRun(ctx, v, r, y, BAR, hits);
  }
}

/** Lanes for the runs of each instance: a run takes the first one that is free. */
export function lanes(all, t0, t1, least) {
  const by = new Map();
  const runs = [];
  for (const row of all) for (const r of within(row.sorted, t0, t1)) if (r.instance) runs.push(r);
  runs.sort((a, b) => a.s - b.s);
  for (const r of runs) {
    if (!by.has(r.instance)) by.set(r.instance, { ends: [], runs: [] });
    const lane = by.get(r.instance);
    let k = lane.ends.findIndex((e) => e <= r.s);
    if (k < 0) k = lane.ends.length;
    // Seven at once are shown; more lie on the last.
    k = Math.min(k, 6);
    lane.ends[k] = Math.max(r.s + least, r.e ?? Infinity);
    lane.runs.push([r, k]);
  }
  return by;
}

export function drawInstance(ctx, v, instance, lane, top, h, fleet, hits) {
  const c = colours();
  for (const b of fleet.bands) {
    if (b.instance !== instance.instance) continue;
    const [x, w] = clip(v, b.from, b.to ?? v.now);
    if (w > 0) hatched(ctx, x, top, Math.max(2, w), h, c.bad);
  }
  for (const [r, k] of lane?.runs || []) drawRun(ctx, v, r, top + 12 + k * 13, 9, hits);
  line(ctx, 0, top + h - 0.5, v.w, top + h - 0.5, c.line);
}

export const tipOf = (hit) => hit.tip || (hit.r ? `${runWords(hit.job, hit.r)}${hit.r.attempt > 1
  ? `\nattempt ${hit.r.attempt}, ${hit.r.trigger}` : ''}${
  hit.r.outcome === 'running' ? `\nfor ${lasting((hit.seen ?? now()) - hit.r.s)}` : ''}` : '');
