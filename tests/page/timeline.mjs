// What the timeline has of a fleet, after any moves of its window and of the clock: what it asks for is compared with what
// a server of its own has. node tests/page/timeline.mjs [FOLDER OF THE PAGE'S FILES]; no browser.
import assert from 'node:assert';
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const PAGE = pathToFileURL(`${process.argv[2] ?? new URL('../../src/http/page', import.meta.url).pathname}/`);
const [SECOND, MIN, HOUR] = [1000, 60_000, 3_600_000];
/** An answer has so many runs; the server keeps so many of each job, and an event has so many. */
const [LIMIT, KEPT, RECENT] = [192, 8, 4];
const iso = (t) => new Date(t).toISOString();

let seed = Number(process.env.SEED ?? 7);
const chance = () => { seed = (seed * 48271) % 2147483647; return seed / 2147483647; };
const upTo = (n) => Math.round(n * chance());

let clock = Date.parse('2026-11-28T12:00:00Z');
let server;
let asked = 0;
const known = { jobs: new Map() };
globalThis.stub = { known, now: () => clock, ask: (path) => {
  asked += 1;
  const q = new URLSearchParams(path.split('?')[1]);
  const answer = server(path.split('?')[0], q, q.getAll('job'));
  return new Promise((r) => { setTimeout(() => r(answer)); });
} };
const text = readFileSync(new URL('timeline_data.js', PAGE), 'utf8')
  .replace("'./store.js'", "'data:text/javascript,export const { known, now, ask } = globalThis.stub'")
  .replace("'./format.js'", `'${new URL('format.js', PAGE)}'`)
  .replace('LIMIT = 5000', `LIMIT = ${LIMIT}`);
const { Data, within } = await import(`data:text/javascript,${encodeURIComponent(text)}`);

/** As the timeline asks: with each frame, until there is nothing to ask for. Returns how many questions that were. */
async function quiet(data, f) {
  const before = asked;
  for (let i = 0; i < 20; i += 1) {
    const [was, busy] = [asked, data.asked.size];
    f();
    while (data.asked.size) await new Promise((r) => { setTimeout(r); });
    if (asked === was && !busy) return asked - before;
  }
  return Infinity;
}

const jobOf = (name, more = {}) => ({ job: name, schedule: ['@daily'], timezone: 'UTC', enabled: true, elsewhere: false,
  recent: [], running: [], ...more });

/** A run as the server and events tell it now. */
function told(r) {
  const { o, s, e, job, run_id } = r;
  const goesOn = e > clock;
  return { job, run_id, occurrence: iso(o), attempt: 1, trigger: 'schedule', started_at: iso(s), duration_ms: (goesOn ? clock
    : e) - s, outcome: goesOn ? 'running' : 'succeeded' };
}

/** The runs of 150 jobs in a day and a half; some begin hours after their instant, and some are long. */
function runsOf(names, born) {
  return new Map(names.map((job) => [job, Array.from({ length: 36 }, (_, i) => {
    const o = born - 10 * HOUR + upTo(36 * HOUR);
    const s = o + (chance() < 0.2 ? upTo(3 * HOUR) : 5);
    return { job, run_id: `${job}/${i}`, o, s, e: s + (chance() < 0.1 ? upTo(5 * HOUR) : upTo(MIN)) };
  })]));
}

/** What the server has of a job: what goes on, and the last that ended. */
function kept(runs) {
  const begun = runs.filter((r) => r.s <= clock);
  const ended = begun.filter((r) => r.e <= clock).sort((a, b) => b.e - a.e);
  return { running: begun.filter((r) => r.e > clock), ended: ended.slice(0, KEPT) };
}

/** Each job that has changed is another object, as after an event. */
function tell(runs) {
  for (const [name, all] of runs) {
    const { running, ended } = kept(all);
    const now = JSON.stringify([running, ended]);
    const was = known.jobs.get(name);
    if (was?.now !== now) known.jobs.set(name, jobOf(name, { now, running: running.map(told), recent: ended.slice(0,
      RECENT).map(told) }));
  }
}

async function anyMoves() {
  const born = clock;
  const names = Array.from({ length: 150 }, (_, i) => `job-${i}`);
  const few = names.slice(0, 30);
  const wrong = [];
  let [steps, cuts] = [0, 0];
  for (let i = 0; i < 60; i += 1) {
    clock = born;
    known.jobs.clear();
    const runs = runsOf(names, born);
    server = (path, q, of) => {
      if (path === 'plan') return { planned: [], frequent: [] };
      const [from, to] = [Date.parse(q.get('from')), Date.parse(q.get('to'))];
      assert(from <= to, `${iso(from)} is after ${iso(to)}`);
      const all = (of.length ? of : names).flatMap((name) => {
        const { running, ended } = kept(runs.get(name));
        return [...running, ...ended];
      }).filter((r) => r.o <= to && (r.o >= from || Math.min(r.e, clock) >= from)).sort((a, b) => b.o - a.o);
      return { runs: all.slice(0, LIMIT).map(told), truncated: all.length > LIMIT };
    };
    const byJobs = i % 3 === 0;
    const data = new Data(() => {});
    let long = Math.round(HOUR * 12 ** chance() / 4);
    let t1 = clock + Math.round(long / 3) - (i % 2 ? upTo(8 * HOUR) : 0);
    for (let step = 0; step < 20; step += 1) {
      tell(runs);
      for (const name of byJobs ? few : names) data.row(name);
      const t0 = t1 - long;
      const n = await quiet(data, () => (byJobs ? data.want(few, t0, t1) : data.all(t0, t1)));
      steps += 1;
      const right = (byJobs ? few : names).flatMap((name) => {
        const { running, ended } = kept(runs.get(name));
        return [...running, ...ended];
      }).filter((r) => r.s < clock - MIN && r.s <= t1 && Math.min(r.e, clock) >= t0);
      const has = new Map();
      for (const name of names) for (const r of within(data.row(name).sorted, t0, t1)) has.set(r.run_id, r);
      const lacks = right.filter((r) => !has.has(r.run_id));
      const said = !!data.lacks(byJobs ? few : null, t0);
      cuts += said;
      const at = `${byJobs ? 'by jobs' : 'all'}, ${i}.${step}: of ${right.length}`;
      const expect = (well, what) => well || wrong.push(`${at} ${what}`);
      expect(n <= (byJobs ? 4 : 3), `${n} questions`);
      expect(!data.error, data.error?.message);
      expect(said || !lacks.length, `${lacks.length} are lacking, unsaid`);
      expect(!said || right.length - lacks.length >= 0.5 * Math.min(LIMIT, right.length), `${lacks.length} are lacking`);
      expect(byJobs || !said || lacks.every((r) => r.o <= data.every.from), 'some are lacking in the middle');
      expect(right.every((r) => !has.has(r.run_id) || (has.get(r.run_id).e == null) === (r.e > clock)), 'some are not as told');
      // The clock, and the window: it follows, is moved by keys, is dragged, or zoomed.
      const passed = chance() < 0.05 ? upTo(5 * HOUR) : upTo(90 * SECOND);
      clock += passed;
      const move = chance();
      if (move < 0.3) t1 += passed;
      else if (move < 0.5) t1 += Math.round((chance() < 0.7 ? -0.2 : 0.2) * long);
      else if (move < 0.6) t1 += upTo(80 * SECOND) - 40 * SECOND;
      else if (move < 0.7) t1 += Math.round((chance() - 0.5) * long);
      else if (move < 0.9) long = Math.round(Math.max(2 * MIN, Math.min(12 * HOUR, long * 4 ** (chance() - 0.5))));
      else t1 = clock + Math.round(long / 3);
    }
  }
  assert.deepEqual(wrong.slice(0, 5), []);
  assert(cuts > 100, `only ${cuts} windows had too many runs`);
  console.log(`timeline: ${steps} windows, ${asked} questions, ${cuts} windows with too many runs`);
}

/** All begin at the instant with which the window ends. */
async function oneInstant() {
  const o = clock - HOUR;
  const all = Array.from({ length: 1000 }, (_, i) => ({ job: `job-${i}`, run_id: `${i}`, o, s: o, e: o + 5 }));
  server = () => ({ runs: all.slice(0, LIMIT).map(told), truncated: true });
  known.jobs.clear();
  const data = new Data(() => {});
  assert(await quiet(data, () => data.all(o - HOUR, o)) <= 2);
}

/** Many runs more than an answer has: each step to the left shows some of them. */
async function tooMany() {
  const all = Array.from({ length: 7200 }, (_, i) => ({ job: `job-${i % 100}`, run_id: `${i}`, o: clock - i * SECOND * 5,
    s: clock - i * SECOND * 5, e: clock - i * SECOND * 5 + 1 }));
  server = (path, q) => {
    const some = all.filter((r) => r.o <= Date.parse(q.get('to')) && r.e >= Date.parse(q.get('from')));
    return { runs: some.slice(0, LIMIT).map(told), truncated: some.length > LIMIT };
  };
  known.jobs.clear();
  const data = new Data(() => {});
  for (let t1 = clock; t1 > clock - 4 * HOUR; t1 -= 3 * MIN) {
    assert(await quiet(data, () => data.all(t1 - 6 * HOUR, t1)) <= 2);
    assert(data.lacks(null, t1 - 6 * HOUR));
    const shown = [...data.rows.values()].flatMap((row) => within(row.sorted, t1 - 6 * HOUR, t1)).length;
    assert(shown > LIMIT / 2, `${shown} of the runs before ${iso(t1)} are shown`);
  }
  const right = new Data(() => {});
  for (let t1 = clock - 3 * HOUR; t1 < clock - 2 * HOUR; t1 += 40 * SECOND) {
    await quiet(right, () => right.all(t1 - 6 * HOUR, t1));
    const shown = [...right.rows.values()].flatMap((row) => within(row.sorted, t1 - MIN, t1)).length;
    assert(shown >= 12, `${shown} of the runs of the minute before ${iso(t1)} are shown`);
  }
}

/** A changed schedule is another plan, also if it changes while the old one is asked for. */
async function plans() {
  let planned = [clock + HOUR];
  server = (path, q, of) => (path === 'plan' ? { planned: planned.flatMap((t) => of.map((job) => ({ job, occurrence:
    iso(t) }))), frequent: [] } : { runs: [] });
  known.jobs.clear();
  known.jobs.set('a', jobOf('a'));
  const data = new Data(() => {});
  const want = () => data.want(['a'], clock - HOUR, clock + 2 * HOUR);
  assert.equal(await quiet(data, want), 2);
  assert.deepEqual(data.row('a').plan, planned);
  // Elsewhere it is asked for again, and back here.
  assert.equal(await quiet(data, () => data.want(['a'], clock + 9 * HOUR, clock + 11 * HOUR)), 1);
  assert.equal(await quiet(data, want), 1);
  for (const late of [false, true]) {
    known.jobs.set('a', jobOf('a', { schedule: [`other, ${late}`] }));
    if (late) {
      want();
      known.jobs.set('a', jobOf('a', { schedule: ['a third one'] }));
    }
    data.row('a');
    planned = [planned[0] + MIN];
    await quiet(data, want);
    assert.deepEqual(data.row('a').plan, planned, `late: ${late}`);
  }
}

/** Answers and events that come in another order than what they tell happened; a job that goes while it runs. */
async function orders() {
  const run = { job: 'a', run_id: '1', o: clock - MIN, s: clock - MIN, e: clock - SECOND };
  known.jobs.clear();
  known.jobs.set('a', jobOf('a', { recent: [told(run)] }));
  const data = new Data(() => {});
  data.row('a');
  data.keep(data.row('a'), told({ ...run, e: Infinity }));
  assert.equal(data.row('a').all.size, 1);
  assert.notEqual([...data.row('a').all.values()][0].e, null, 'what has ended runs again');
  data.keep(data.row('a'), { ...told(run), error: 'why' });
  known.jobs.set('a', jobOf('a', { recent: [told(run)] }));
  assert.equal([...data.row('a').all.values()][0].error, 'why');
  const goesOn = { ...told({ ...run, run_id: '2', o: run.o + 1, e: Infinity }), instance: 'x' };
  known.jobs.set('a', jobOf('a', { running: [goesOn] }));
  assert.equal(data.row('a').sorted.at(-1).e, null);
  known.jobs.delete('a');
  known.instances = { instances: [{ instance: 'x', running: [{ job: 'a', occurrence: goesOn.occurrence }] }] };
  assert.equal(data.row('a').sorted.at(-1).e, null, 'its instance runs it');
  known.instances.instances[0].running = [];
  assert(data.row('a').sorted.every((r) => r.e != null), 'a job that is gone runs on');
}

/** What was let go of is asked for again. */
async function backAgain() {
  const all = Array.from({ length: 150 }, (_, i) => ({ job: 'a', run_id: `${i}`, o: clock - i * 10 * SECOND - 9,
    s: clock - i * 10 * SECOND - 9, e: clock - i * 10 * SECOND - 1 }));
  server = (path, q) => ({ runs: all.filter((r) => r.o <= Date.parse(q.get('to')) && r.e >= Date.parse(q.get('from'))).map(
    told), planned: [], frequent: [] });
  for (const ask of ['all', 'want']) {
    const names = ask === 'all' ? [] : [['a']];
    known.jobs.clear();
    const data = new Data(() => {});
    const shown = async (t0, t1) => {
      await quiet(data, () => data[ask](...names, t0, t1));
      return within(data.row('a').sorted, t0, t1).length;
    };
    assert.equal(await shown(clock - HOUR, clock), 150);
    for (const far of [-50, -3, 50]) {
      data.row('a').room = 100;
      await shown(clock + far * HOUR, clock + (far + 1) * HOUR);
      assert.equal(data.row('a').all.size, 0);
      assert.equal(await shown(clock - HOUR, clock), 150);
    }
  }
}

/** A page that is open for half a day, beside a job that runs each five seconds: followed, or left in the past. */
async function longOpen() {
  server = () => ({ runs: [], planned: [], frequent: [] });
  const born = clock;
  for (const follows of [true, false]) {
    for (const all of [true, false]) {
      clock = born;
      known.jobs.clear();
      const data = new Data(() => {});
      let most = 0;
      for (let i = 0; i < 8640; i += 1) {
        clock += 5 * SECOND;
        const run = { job: 'a', run_id: `${i}`, o: clock - 5, s: clock - 5, e: clock - 1 };
        known.jobs.set('a', jobOf('a', { recent: [told(run)] }));
        data.row('a');
        const t1 = follows ? clock + 10 * MIN : born;
        if (i % 20 === 0) await quiet(data, () => (all ? data.all(t1 - 30 * MIN, t1) : data.want(['a'], t1 - 30 * MIN, t1)));
        most = Math.max(most, data.row('a').all.size);
      }
      assert(most <= 2000, `there were ${most} records at one time`);
    }
  }
  clock = born;
}

for (const test of [anyMoves, oneInstant, tooMany, plans, orders, backAgain, longOpen]) await test();
