// What state a job is in, and whether a person should look at it. Pure.
import { hms, ms, number, S } from './format.js';

/** Outcomes that are nobody's wish. */
export const BAD = ['failed', 'timed_out', 'crashed', 'unknown', 'lease_lost'];
export const OUTCOMES = ['succeeded', ...BAD, 'missed', 'skipped', 'cancelled', 'replaced'];
/** A worse one stands for the others of its day or cell. */
const RANK = ['succeeded', 'running', 'replaced', 'skipped', 'cancelled', 'missed', 'lease_lost', 'unknown', 'crashed',
  'timed_out', 'failed'];
export const worst = (outcomes) => outcomes.reduce((a, b) => (RANK.indexOf(b) > RANK.indexOf(a) ? b : a));

/** What is ahead of a job of which no occurrence is known that will run. */
export const ahead = (job) => (!job.passed_over ? 'not planned again'
  : job.paused && !job.paused.until ? 'not before it is resumed' : job.skip ? `the next ${number(job.skip)} will be skipped`
    : 'what is planned will not run');

/** Longer than this is unusual for the job, ms. */
export const longAfter = (job) => (job.typical_ms == null ? Infinity : Math.max(2.5 * job.typical_ms, job.typical_ms
  + 5 * S));

const WORDS = {
  timed_out: 'timed out', lease_lost: 'lease lost', retry: 'failed, will retry', slow: 'running long',
  unreadable: 'cannot be read', ahead: 'does not start',
  new: 'not registered yet', quarantined: 'waits for the store', off: 'switched off', manual: 'runs only when triggered',
  none: 'has not run yet', lapsed: 'its holder is gone', elsewhere: 'on other instances', overdue: 'without a success',
};
/** A state or an outcome, in words. */
export const word = (key) => WORDS[key] || key;

/** What caused a run, in words. */
export const cause = (trigger) => (trigger === 'catch_up' ? 'caught up' : trigger);

const ICON = { unreadable: 'unknown', ahead: 'slow', lapsed: 'lease_lost', overdue: 'missed', elsewhere: 'drift' };
/**
 * What the instance judged of a job, and what time alone changes. `key` names the state, `icon` its sign, `group` the
 * chip it counts for.
 */
export function judge({ state, attention, running: [run], last, ...job }, now) {
  const is = (key, group) => ({ key, group, icon: ICON[key] ?? key });
  if (attention) return is(state, 'attention');
  if (run && now - ms(run.started_at) > longAfter(job)) return is('slow', 'attention');
  if (run) return is('running', 'running');
  // What never ran cannot be well.
  return is(state, state === 'paused' ? state : last ? 'well' : 'never');
}

/** Why nothing starts in the whole fleet, if that is so, by what the page knows. */
export function halted({ fleet, instances, store }) {
  if (!store.reachable) return 'Nothing starts until the store answers';
  // Of a page that was opened at a job, the job may be known first.
  if (!fleet) return null;
  if (fleet.nobody_believes) return 'Nothing starts: no instance believes the store’s clock';
  const { epoch } = fleet;
  if (epoch && !epoch.open) {
    return epoch.wait_ms == null ? 'Nothing starts: no instance is up'
      : `Nothing starts until ${hms(epoch.until)}: the store is new or lost its data`;
  }
  const live = instances?.instances.filter((i) => !i.silent);
  if (live?.length === 0) return 'Nothing starts: no instance is heard from';
  return live?.every((i) => i.draining) ? 'Nothing starts until an instance is undrained, or another one is up' : null;
}

/**
 * The records of one occurrence as one, oldest occurrence first: the last attempt says how it ended, the first how late
 * it was.
 */
export function byOccurrence(records) {
  const found = new Map();
  for (const r of records) {
    const was = found.get(r.occurrence);
    if (!was) found.set(r.occurrence, { ...r, attempts: r.attempt ? 1 : 0 });
    else {
      const [first, last] = r.attempt > was.attempt ? [was, r] : [r, was];
      found.set(r.occurrence, { ...last, attempts: was.attempts + 1, lateness_ms: first.lateness_ms });
    }
  }
  return [...found.values()].sort((a, b) => (a.occurrence < b.occurrence ? -1 : 1));
}
