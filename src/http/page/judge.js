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
  new: 'not registered yet', quarantined: 'waits for the store', off: 'switched off',
    manual: 'runs only when triggered',
  none: 'has not run yet', lapsed: 'its holder is gone', again: 'failed, runs again',
  elsewhere: 'on other instances',
};
/** A state or an outcome, in words. */
export const word = (key) => WORDS[key] || key;

/** What caused a run, in words. */
export const cause = (trigger) => (trigger === 'catch_up' ? 'caught up' : trigger);

/** `key` names the state, `icon` its sign, `group` the chip it counts for, `bad` how the attention line looks. */
export function judge(job, now) {
  const is = (key, group, icon = key, bad = true) => ({ key, group, icon, bad });
  if (job.unreadable) return is('unreadable', 'attention', 'unknown');
  if (job.decided_ahead) return is('ahead', 'attention', 'slow', false);
  const [run] = job.running;
  if (run) {
    if (job.lapsed) return is('lapsed', 'attention', 'lease_lost');
    if (now - ms(run.started_at) > longAfter(job)) return is('slow', 'attention', 'slow', false);
    // That it runs again does not make good what went wrong.
    if (BAD.includes(job.last?.outcome)) return is('again', 'attention', 'running');
    return is('running', 'running');
  }
  // Without an end it lasts until it is resumed.
  if (job.paused && (ms(job.paused.until) ?? Infinity) > now) return is('paused', 'paused');
  // What never ran cannot be well.
  const calm = job.last ? 'well' : 'never';
  if (!job.enabled) return is('off', calm, 'off');
  if (job.awaited.length) return is('retry', 'attention');
  const newest = job.recent?.[0];
  if (newest && newest.outcome === 'missed') return is('missed', 'attention', 'missed', false);
  const last = job.last?.outcome;
  if (BAD.includes(last)) return is(last, 'attention');
  if (job.elsewhere && !last) return is('elsewhere', calm, 'drift');
  if (!job.known) return is('new', calm, 'planned');
  if (job.quarantined) return is('quarantined', calm, 'planned');
  if (!last) return is(job.schedule.length ? 'none' : 'manual', calm, 'planned');
  if (job.newest_not_run && newest) return is(newest.outcome, 'well');
  return is(last, 'well');
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
