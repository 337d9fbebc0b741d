// The runs and planned occurrences that the timeline draws: asked for by row and span, kept, and renewed by events.
import { ask, known, now } from './store.js';
import { ms } from './format.js';

/** In one request. */
const ROWS = 40;
const LIMIT = 5000;
/** A job with more planned occurrences than this in a span is drawn as a dotted line. */
const PLAN_MOST = 400;
/** All that is planned of so many jobs fits into one answer, which has 10,000 at most. */
const PLAN_ROWS = 25;

const iso = (t) => new Date(t).toISOString();
const keyOf = (r) => `${r.occurrence}/${r.attempt}`;

/** Times as numbers, once, because each frame compares them. */
function record(r) {
  const o = ms(r.occurrence);
  const s = ms(r.started_at);
  const end = s == null ? o : r.duration_ms != null ? s + r.duration_ms : null;
  return { ...r, job: r.job, o, s: s ?? o, e: end };
}

/**
 * The span of which all is known, after `asked` was asked for: `from`, `to`, and of how many jobs. Of two that do not
 * touch, the newer one. `oldest`: the answer was cut, and this is the first instant that it has.
 */
function covered(was, asked, oldest) {
  const { to } = asked;
  // A run that began before was still active.
  const from = Math.max(asked.from, oldest ?? asked.from);
  const touch = from <= was.to && to >= was.from;
  const cut = oldest == null ? null : asked;
  return touch ? { from: Math.min(was.from, from), to: Math.max(was.to, to), cut } : { from, to, cut };
}

/** The same question as one whose answer was cut would be answered the same. */
const inVain = (cut, { from, to, n }) => cut && n > 0.75 * cut.n && to - from > 0.75 * (cut.to - cut.from)
  && to < cut.to + 60_000 && to > cut.to - 0.25 * (to - from);

const oldestOf = (answer) => (answer.truncated ? Math.min(...answer.runs.map((r) => ms(r.occurrence))) : null);

export class Data {
  constructor(drawn) {
    this.drawn = drawn;
    /** By job: records by key, the same sorted by occurrence, and the span that they cover. */
    this.rows = new Map();
    this.asked = new Set();
    this.error = null;
    this.stop = new AbortController();
  }

  row(name) {
    let row = this.rows.get(name);
    if (!row) this.rows.set(name, (row = { all: new Map(), sorted: [], from: Infinity, to: -Infinity, cut: null,
      of: null, plan: [], planTo: 0, planSpan: 0, dense: false }));
    const job = known.jobs.get(name);
    // An event replaced the job: its newest runs are in it.
    if (job && row.of !== job) {
      row.of = job;
      for (const r of job.recent || []) row.all.set(keyOf(r), record({ ...r, job: name }));
      for (const r of job.running) row.all.set(keyOf(r), record(r));
      const open = new Set(job.running.map(keyOf));
      for (const [k, r] of row.all) if (r.e == null && !open.has(k)) row.all.delete(k);
      this.sort(row);
    }
    return row;
  }

  sort(row) {
    row.sorted = [...row.all.values()].sort((a, b) => a.o - b.o || a.attempt - b.attempt);
  }

  /** Asks for what is missing of these jobs between `t0` and `t1`. */
  want(names, t0, t1) {
    const span = t1 - t0;
    const end = Math.min(t1 + span / 2, now());
    const lacking = names.filter((n) => {
      const row = this.row(n);
      return t0 < now() && (row.from > t0 || row.to < Math.min(t1, now()) - 60_000) && !this.asked.has(`r${n}`);
    });
    // What lies beside the window may be what there was no room for.
    const tight = lacking.some((n) => this.row(n).cut);
    const asked = { ...(tight ? { from: t0, to: Math.min(t1, now()) } : { from: t0 - span / 2, to: end }),
      n: Math.min(ROWS, lacking.length) };
    const past = lacking.filter((n) => !inVain(this.row(n).cut, asked));
    for (let i = 0; i < past.length; i += ROWS) {
      const names = past.slice(i, i + ROWS);
      this.runs(names, { ...asked, n: names.length });
    }
    // What was too much for a longer span may be drawn in a shorter one.
    const to = t1 + span / 2;
    const unplanned = (row) => row.planTo < t1 || (row.dense && to - now() < row.planSpan / 2);
    const ahead = t1 > now() ? names.filter((n) => unplanned(this.row(n)) && !this.asked.has(`p${n}`)) : [];
    for (let i = 0; i < ahead.length; i += PLAN_ROWS) this.plan(ahead.slice(i, i + PLAN_ROWS), to);
  }

  /** Whether runs after `t0` are left out, of these jobs, or of all. */
  lacks(names, t0) {
    const of = (span) => span?.cut && span.from > t0;
    return names ? names.some((n) => of(this.row(n))) : of(this.every);
  }

  async load(names, mark, f) {
    for (const n of names) this.asked.add(mark + n);
    try {
      await f();
      this.error = null;
    } catch (error) {
      if (!this.stop.signal.aborted) this.error = error;
      // Not asked again at once, or a failing server would be asked with each frame.
      await new Promise((r) => setTimeout(r, 3000));
    } finally {
      for (const n of names) this.asked.delete(mark + n);
      if (!this.stop.signal.aborted) this.drawn();
    }
  }

  runs(names, asked) {
    return this.load(names, 'r', async () => {
      const q = new URLSearchParams({ from: iso(asked.from), to: iso(asked.to), limit: String(LIMIT) });
      for (const n of names) q.append('job', n);
      const answer = await ask(`runs?${q}`, { signal: this.stop.signal });
      this.take(answer.runs);
      for (const n of names) Object.assign(this.row(n), covered(this.row(n), asked, oldestOf(answer)));
    });
  }

  take(runs) {
    const touched = new Set();
    for (const r of runs) {
      const row = this.row(r.job);
      row.all.set(keyOf(r), record(r));
      touched.add(row);
    }
    for (const row of touched) this.sort(row);
  }

  plan(names, to) {
    return this.load(names, 'p', async () => {
      const from = now();
      const q = new URLSearchParams({ from: iso(from), to: iso(to), limit: String(PLAN_ROWS * PLAN_MOST),
        per_job: String(PLAN_MOST) });
      for (const n of names) q.append('job', n);
      const answer = await ask(`plan?${q}`, { signal: this.stop.signal });
      const plans = new Map(names.map((n) => [n, []]));
      for (const p of answer.planned) plans.get(p.job)?.push(ms(p.occurrence));
      const dense = new Set(answer.frequent.map((f) => f.job));
      for (const n of names) {
        const row = this.row(n);
        row.plan = plans.get(n);
        row.dense = dense.has(n);
        row.planTo = to;
        row.planSpan = to - from;
      }
    });
  }

  /** For the view by instance: the runs of all jobs. */
  all(t0, t1) {
    const span = t1 - t0;
    if (t0 > now() || this.asked.has('r*')) return;
    const end = Math.min(t1 + span / 2, now());
    if (this.every && this.every.from <= t0 && this.every.to >= Math.min(t1, now()) - 60_000) return;
    const tight = this.every?.cut;
    const asked = { ...(tight ? { from: t0, to: Math.min(t1, now()) } : { from: t0 - span / 2, to: end }), n: 1 };
    if (inVain(this.every?.cut, asked)) return;
    this.load(['*'], 'r', async () => {
      const q = new URLSearchParams({ from: iso(asked.from), to: iso(asked.to), limit: String(LIMIT) });
      const answer = await ask(`runs?${q}`, { signal: this.stop.signal });
      this.take(answer.runs);
      this.every = covered(this.every ?? { from: Infinity, to: -Infinity }, asked, oldestOf(answer));
    });
  }
}

/** The records that touch the span; a run that began long before it is found by `longest`. */
export function within(sorted, t0, t1, longest) {
  let [a, b] = [0, sorted.length];
  while (a < b) {
    const m = (a + b) >> 1;
    if (sorted[m].o < t0 - longest) a = m + 1;
    else b = m;
  }
  const found = [];
  for (let i = a; i < sorted.length && sorted[i].o <= t1; i++) {
    const r = sorted[i];
    if ((r.e ?? Infinity) >= t0) found.push(r);
  }
  return found;
}

/** What happened to the fleet as a whole, from the events: marks, and spans in which something was out of reach. */
export function fleetMarks() {
  const marks = [];
  const bands = [];
  // By name; null is the store.
  const down = new Map();
  for (const e of [...known.feed].reverse()) {
    const at = ms(e.at);
    if (e.kind === 'store') {
      if (!e.reachable) {
        down.set(null, { from: ms(e.since) ?? at });
        marks.push({ at: ms(e.since) ?? at, text: 'store lost', bad: true, detail: e.error || '' });
      } else if (down.has(null)) {
        bands.push({ from: down.get(null).from, to: at });
        down.delete(null);
      }
    } else if (e.kind === 'instance_silent' || e.kind === 'instance_gone') {
      if (!down.has(e.instance)) down.set(e.instance, { from: at });
      if (e.kind === 'instance_gone') down.get(e.instance).gone ??= at;
      marks.push({ at, text: `${e.instance} ${e.kind === 'instance_gone' ? 'gone' : 'silent'}`, bad: true });
    } else if (e.kind === 'instance_up') {
      if (down.has(e.instance)) bands.push({ from: down.get(e.instance).from, to: at, instance: e.instance });
      down.delete(e.instance);
      marks.push({ at, text: `${e.instance} up` });
    } else if (e.kind === 'configuration') marks.push({ at, text: 'reload' });
    else if (e.kind === 'draining') marks.push({ at, text: `drain ${e.instance}` });
    else if (e.kind === 'undrained') marks.push({ at, text: `undrain ${e.instance}` });
  }
  // Who is gone for good is missed by nobody; and that one is up again may have been told while the page heard nothing.
  const silent = new Set((known.instances?.instances ?? []).filter((i) => i.silent).map((i) => i.instance));
  for (const [who, { from, gone }] of down) {
    const to = who === null || silent.has(who) ? null : gone ?? from;
    if (to !== from) bands.push({ from, to, ...(who !== null && { instance: who }) });
  }
  // The loss of the store is noted later than it was.
  return { marks: marks.sort((a, b) => a.at - b.at), bands };
}
