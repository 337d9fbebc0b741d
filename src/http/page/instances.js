// The instances: is a host sick? And the store, as this page saw it since it was opened.
import { html, useRef, useState } from './base.js';
import { known, now, useTopics } from './store.js';
import { D, S, clean, lasting, left, many, ms, number, short, signed, took, when } from './format.js';
import { Icon } from './icons.js';
import { Btn, Live, Since, Txt } from './parts.js';
import { act } from './actions.js';
import { jobLink } from './router.js';
import { useKeys } from './keys.js';
import { median, quantile } from './chart.js';

/** A line of numbers in a small box. */
function Spark({ list, w = 90, h = 24, hue = 'var(--tx3)' }) {
  if (list.length < 3) return html`<span class="t3">just opened</span>`;
  const [low, high] = [Math.min(...list), Math.max(...list)];
  const d = list.map((v, i) => `${((i * w) / (list.length - 1)).toFixed(1)} ${(h - 3 - ((v - low) / (high - low
    || 1)) * (h - 6)).toFixed(1)}`).join('L');
  return html`<svg width=${w} height=${h} viewBox=${`0 0 ${w} ${h}`} aria-hidden="true"><path d=${`M${d}`} fill="none"
    stroke=${hue} stroke-width="1.4" /></svg>`;
}

const offset = (n) => `${n < 0 ? '−' : '+'}${Math.abs(n).toFixed(Math.abs(n) < 100 ? 1 : 0)}\u00a0ms`;
const NICE = [2, 4, 10, 20, 40, 100, 200, 500, 1000, 5000, 20000, 100000];

function Offset({ value, reach, warn }) {
  const x = 110 + Math.max(-1, Math.min(1, value / reach)) * 96;
  return html`<svg width="220" height="24" aria-hidden="true"><path d="M110 0v24" stroke="var(--line2)" /><path
    d="M0 12h220" stroke="var(--line)" />
    <circle cx=${x} cy="12" r="4" fill=${warn ? 'var(--warn)' : 'var(--ac)'} /></svg>`;
}

/** What one sentence says of all of them. */
function sentence(list) {
  if (!known.store.reachable) {
    return `The store is silent${known.store.since ? ` since ${when(Math.floor(known.store.since / 1000) * 1000, now())}`
      : ''}: nobody knows how the instances are; what you see is from before`;
  }
  const silent = list.filter((i) => i.silent);
  const heard = list.length - silent.length;
  const parts = [silent.length ? `${number(heard)} of ${many(list.length, 'instance')} ${heard === 1 ? 'is'
    : 'are'} heard from`
    : list.length === 1 ? 'The one instance is heard from' : `All ${number(list.length)} instances are heard from`];
  if (heard && list.every((i) => i.silent || i.draining)) parts.push(heard === 1 ? 'it drains, so nothing starts'
    : 'all of them drain, so nothing starts');
  const differ = list.filter((i) => i.config_differs && !i.silent);
  if (differ.length) parts.push(differ.length === 1 ? `${short(differ[0].instance)} runs another configuration`
    : `${differ.length} run another configuration`);
  const warn = list.filter((i) => i.clock_warning && !i.silent);
  if (warn.length) parts.push(warn.length === 1 ? `the clock of ${short(warn[0].instance)} is off`
    : `${warn.length} clocks are off`);
  return parts.join('; ');
}

const Drain = ({ i, c = '' }) => html`<${Btn} c=${`s ${c}`} acts
  onClick=${() => act(i.draining ? 'undrain' : 'drain', i.instance)}>${i.draining ? 'Undrain …' : 'Drain …'}<//>`;

const WON = 'Attempts of the last 24 hours that it started, of the last 24 of each job: not all, if a job runs more often';

/** How many attempts each instance won, of those of the last 24 hours that this page knows: the last 24 of each job. */
export function wins(jobs, n) {
  const won = new Map();
  for (const j of jobs) {
    for (const r of [...j.running, ...(j.recent || [])]) {
      if (!r.attempt || !r.instance || !(ms(r.started_at) >= n - D)) continue;
      won.set(r.instance, (won.get(r.instance) || 0) + 1);
    }
  }
  return won;
}

function Row({ i, reach, common, sel, me, won, all }) {
  const n = now();
  const trail = known.trail.offsets.get(i.instance) || [];
  return html`<tr class=${sel ? 'sel' : ''}>
    <th scope="row"><div class="i-n"><${Icon} k=${i.silent ? 'lease_lost' : i.draining ? 'drain' : 'succeeded'}
      label=${i.silent ? 'not heard from' : i.draining ? 'draining' : 'heard from'} />
      <span><b class="b" tabindex=${sel ? 0 : -1}
        data-tip=${`${clean(i.instance)}\nhost ${clean(i.host)}, pid ${i.pid}`}><${Txt}>${short(i.instance)}<//></b>${me
          && html` <span class="tag">serves this page</span>`}<br />
      <span class="t3">${i.silent ? 'not heard from' : i.draining ? 'draining' : 'up'} ${i.silent || i.draining ? ''
        : html`<${Since} t=${ms(i.started_at)} />`}</span><${Drain} i=${i} c="i-p" /></span></div></th>
    <td class="i-r">${i.running.slice(0, 4).map((r) => html`<div key=${r.job + r.occurrence}><a class="a"
      href=${jobLink(r.job, ms(r.occurrence))}><${Txt}>${r.job}<//></a>
      ${' '}<span class="t3">of ${when(ms(r.occurrence), n)}</span></div>`)}${i.running.length > 4 && html`<div
        class="t3">and ${i.running.length - 4} more</div>`}
      ${!i.running.length && html`<span class="t3">nothing</span>`}</td>
    <td class="num t2 i-s"><${Live} f=${(t) => (t - ms(i.last_seen) < S ? 'now'
      : `${lasting(t - ms(i.last_seen))} ago`)} /></td>
    <td class="i-o"><${Offset} value=${i.clock_offset_ms} reach=${reach} warn=${i.clock_warning} /></td>
    <td class="i-d"><div class="i-n"><${Spark} list=${trail} /></div></td>
    <td class=${`num ${i.clock_warning ? 'x-missed' : ''}`}>${offset(i.clock_offset_ms)}
      ${i.clock_doubt_ms != null && html`<br /><span class="x-missed">doubts the store’s clock
        by ${took(Math.abs(i.clock_doubt_ms))}</span>`}</td>
    <td class="num i-w">${number(won)}${all > 0 && html` <span class="t3">${Math.round((won * 100)
      / all)} %</span>`}</td>
    <td class="num i-j">${number(i.jobs)}</td>
    <td class=${`i-v ${i.version === common ? '' : 'x-missed'}`}>${clean(i.version)}</td>
    <td>${i.config_differs && html`<${Icon} k="drift" /> `}<code data-tip=${clean(i.config)}>${clean(i.config).slice(0,
      8)}</code>${i.config_differs && html`<br /><span class="x-missed">differs</span>`}</td>
    <td class="i-a"><div class="acts"><${Drain} i=${i} /></div></td></tr>`;
}

function Store({ view }) {
  const { store, trail, fleet } = known;
  const sorted = [...trail.store].sort((a, b) => a - b);
  const outages = [];
  let from = null;
  for (const e of [...known.feed].reverse()) {
    if (e.kind !== 'store') continue;
    if (!e.reachable) from = ms(e.since) ?? ms(e.at);
    else if (from != null) {
      outages.push([from, ms(e.at)]);
      from = null;
    }
  }
  const last = outages[outages.length - 1];
  const sec = (t) => when(Math.floor(t / 1000) * 1000, now());
  const waiting = [...known.jobs.values()].filter((j) => j.quarantined);
  const unreadable = [...known.jobs.values()].filter((j) => j.unreadable);
  const big = (n) => (n == null ? '–' : n < 10 ? `${n.toFixed(1)}\u00a0ms` : took(n));
  return html`<div><h2 class="h2">Store<small><${Txt}>${view.store?.address ?? fleet?.store ?? ''}<//></small></h2>
    <div class="i-lat"><div><div class="t3">Answer, median</div><div class="big">${big(median(sorted))}</div></div>
      <div><div class="t3">99 %</div><div class="big">${big(quantile(sorted, 0.99))}</div></div><${Spark}
        list=${trail.store} w=${220} h=${44} hue="var(--ac)" /></div>
    <dl class="kv"><dt>Now</dt><dd>${store.reachable ? 'it answers' : html`<span class="x-failed">it cannot be
      reached${store.since ? ` since ${sec(store.since)}` : ''}</span>${store.error
        && html`: <${Txt}>${store.error}<//>`}`}</dd>
      <dt>Its data</dt><dd>${!view.epoch ? 'not heard from yet'
        : html`since ${sec(ms(view.epoch.since))}${view.epoch.open ? '' : view.epoch.wait_ms == null
          ? '; nothing is granted: no instance is up'
            : `; nothing is granted for ${left(view.epoch.wait_ms)} more`}`}</dd>
      <dt>Out of reach</dt><dd>${!store.reachable ? 'now' : last ? `${sec(last[0])} for ${took(last[1] - last[0])}`
        : 'not since this page knows it'}</dd>
      <dt>Jobs that wait</dt><dd>${waiting.length ? waiting.slice(0, 8).map((j, k) => html`${k ? ', ' : ''}<a class="a"
        href=${jobLink(j.job)}><${Txt}>${j.job}<//></a>`) : 'no job'}${waiting.length > 8 && ' …'}</dd>
      ${unreadable.length > 0 && html`<dt>Unreadable</dt><dd class="x-failed">${many(unreadable.length, 'job')}</dd>`}
      ${fleet?.clock_doubt_ms != null && html`<dt>Clock</dt><dd
        class="x-missed">${took(Math.abs(fleet.clock_doubt_ms))} ${fleet.clock_doubt_ms > 0 ? 'ahead' : 'behind'}, as
          instances measure it</dd>`}
    </dl>${(fleet?.problems || []).map((p) => html`<p class="note" key=${p}><${Icon} k="slow" /><${Txt}>${p}<//></p>`)}
    <p class="t3 gap-s">Measured since this page was opened.</p></div>`;
}

function Configurations({ list }) {
  const by = new Map();
  for (const i of list) by.set(i.config, [...(by.get(i.config) || []), i]);
  const other = [...known.jobs.values()].filter((j) => j.other_definition);
  return html`<div><h2 class="h2">Configuration</h2>${by.size === 1 ? html`<p class="t2">All have the
    same, <code>${clean([...by.keys()][0])}</code>.</p>`
    : html`<dl class="kv">${[...by].map(([config, on]) => html`<dt key=${config}><code>${clean(config).slice(0,
      12)}</code></dt><dd>${on.map((i) => short(i.instance)).join(', ')}</dd>`)}</dl>
    <p class="t3 gap-s">Each reads its own <code>jobs.toml</code>. Copy the right one there and run <code>systemctl
      reload soloist</code>. Until then an occurrence runs by the
    ${' '}definition of the instance that wins it.</p>`}
    ${other.length > 0 && html`<p class="t2 gap-s">${many(other.length, 'job has', 'jobs have')} another definition in
      the fleet than on the instance that serves this page:
      ${' '}${other.slice(0, 10).map((j, k) => html`${k ? ', ' : ''}<a class="a"
        href=${jobLink(j.job)}><${Txt}>${j.job}<//></a>`)}${other.length > 10 && ' …'}</p>`}</div>`;
}

export function Instances() {
  useTopics('instances', 'link', 'session', 'jobs');
  const [sel, set] = useState(-1);
  const table = useRef();
  const view = known.instances;
  const list = view?.instances || [];
  const move = (step) => {
    const to = Math.max(0, Math.min(list.length - 1, sel + step));
    set(to);
    requestAnimationFrame(() => table.current?.querySelector('tr.sel b')?.focus());
  };
  const picked = list[sel];
  useKeys('Instances', {
    j: ['next', () => move(1)], k: ['before', () => move(-1)],
    d: ['drain or undrain', () => (picked ? act(picked.draining ? 'undrain' : 'drain', picked.instance) : false)],
  });
  if (!view) return html`<h1 class="verdict">Instances</h1><p class="sub">Asking …</p>`;
  const reach = NICE.find((n) => n >= Math.max(...list.filter((i) => !i.silent).map((i) => Math.abs(i.clock_offset_ms)),
    0)) ?? 1e6;
  const versions = list.map((i) => i.version);
  const common = versions.sort((a, b) => versions.filter((v) => v === b).length - versions.filter((v) =>
    v === a).length)[0];
  const won = wins(known.jobs.values(), now());
  const all = [...won.values()].reduce((a, b) => a + b, 0);
  return html`<div role="status"><h1 class="verdict">${list.length ? sentence(list) : 'No instance is known'}</h1></div>
  <p class="sub">Instances schedule by the store’s clock, so an offset moves no job. It is shown because a clock that
    drifts tells of a sick host.</p>
  ${list.length > 0 && html`<div class="sec"><table class="rows inst" ref=${table}><caption
    class="sr">Instances</caption><thead><tr><th>Instance</th>
    <th class="i-r">Running</th><th class="num i-s">Last seen</th>
    <th class="i-o">Clock against the store, ms<svg width="220" height="16" aria-hidden="true">${[-1, -0.5, 0, 0.5,
      1].map((k) => html`<text x=${110 + k * 96} y="12" text-anchor="middle">${signed(k * reach)}</text>`)}</svg></th>
    <th class="i-d">Drift</th><th class="num">Offset</th>
    <th class="num i-w"><span tabindex="0" data-tip=${WON}>Started in 24 h</span></th>
    <th class="num i-j">Jobs</th><th
      class="i-v">Version</th><th>Configuration</th><th class="i-a"><span
        class="sr">Actions</span></th></tr></thead>
    <tbody>${list.map((i, k) => html`<${Row} key=${i.instance} i=${i} reach=${reach} common=${common} sel=${k === sel}
      me=${i.instance === known.session?.instance} won=${won.get(i.instance) || 0} all=${all} />`)}</tbody></table></div>`}
  <div class="two sec"><${Configurations} list=${list} /><${Store} view=${view} /></div>`;
}
