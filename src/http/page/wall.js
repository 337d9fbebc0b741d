// The wallboard: the verdict, what needs attention, all jobs, and a clock that proves that the page lives.
import { html, useEffect, useState } from './base.js';
import { known, useTopics } from './store.js';
import { hms, left, ms, number, when, zoneName } from './format.js';
import { Icon } from './icons.js';
import { Live, Memo, Strip, Txt } from './parts.js';
import { halted, word } from './judge.js';
import { Attention, Verdict, attention } from './overview.js';
import { go, jobLink } from './router.js';
import { useKeys } from './keys.js';

/** Room for so many; the others take turns. */
const MOST = 24;
const TURN_MS = 15_000;

function next(job, state, t) {
  if (state.key === 'paused') return 'paused';
  if (job.running.length) return 'running';
  const at = ms(job.awaited[0]?.at ?? job.next);
  if (at != null && halted(known)) return when(at, t);
  return at == null ? (job.enabled ? '–' : 'off') : at > t ? left(at - t) : 'now';
}

const Tile = ({ job, state }) => html`<li><${Icon} k=${state.icon} label=${word(state.key)} /><a class="b"
  href=${jobLink(job.job)}><${Txt}>${job.job}<//></a>
  <${Live} c="t2" f=${(t) => next(job, state, t)} /><${Strip} job=${job} wide /></li>`;

export function Wall() {
  useTopics('jobs', 'instances', 'link');
  const [turn, set] = useState(0);
  const all = [...known.jobs.values()];
  const pages = Math.max(1, Math.ceil(all.length / MOST));
  useEffect(() => {
    const timer = setInterval(() => set((n) => n + 1), TURN_MS);
    return () => clearInterval(timer);
  }, []);
  useKeys('Wallboard', { Esc: ['leave', () => go('#/overview')], '→': ['next jobs', () => set(turn + 1)],
    '←': ['jobs before', () => set(Math.max(0, turn - 1))] });
  const group = (j) => ['attention', 'running', 'paused', 'never', 'well'].indexOf(known.states.get(j.job).group);
  const list = all.sort((a, b) => group(a) - group(b));
  const page = turn % pages;
  const shown = list.slice(page * MOST, page * MOST + MOST);
  return html`<div class="wc" aria-hidden="true"><${Live} f=${hms} /><small>${zoneName}</small></div><a class="t3 leave"
    href="#/overview">leave</a>
    <${Verdict} /><${Attention} names=${attention()} />
    <ul class=${`wg ${halted(known) ? 'held' : ''}`} aria-label="Jobs">${shown.map((job) => html`<${Memo} key=${job.job} same=${[job,
      known.states.get(job.job).key]} draw=${() => html`<${Tile} job=${job} state=${known.states.get(job.job)} />`}
        />`)}</ul>
    ${pages > 1 && html`<p class="t3">${number(page * MOST + 1)} to ${number(Math.min(all.length, page * MOST
      + MOST))} of ${number(all.length)} jobs; those that need attention come first.</p>`}`;
}
