// One occurrence, in a panel beside its job: why there, why not elsewhere, and what it wrote.
import { html, useEffect, useLayoutEffect, useRef, useState } from './base.js';
import { ask, events, known, now, useTopics } from './store.js';
import { bytes, clean, commandLine, hms, hmsm, left, many, ms, short, signalName, took, visible, when } from
  './format.js';
import { Icon } from './icons.js';
import { cause, halted, word } from './judge.js';
import { Btn, Copy, Failed, Live, On, Output, Since, Txt, marked, unmarked, useLoaded, written } from './parts.js';
import { act } from './actions.js';
import { address, setQuery } from './router.js';
import { median } from './chart.js';

const enc = encodeURIComponent;
/** More of an output is not shown: characters of a live one, bytes of one that has ended. */
const HELD = 1 << 19;
/** A longer output is drawn at most so often, ms. */
const AT_ONCE = 1 << 15;
const DRAWN_MS = 300;

// ---- attempts

function Attempt({ r, several, shown, pick }) {
  const end = r.exit_code != null ? `exit ${r.exit_code}` : r.signal != null ? signalName(r.signal) : '';
  return html`<li class=${several && shown ? 'sel' : ''}><${Icon} k=${r.outcome} /><span class="nw"
    data-tip=${r.started_at && hmsm(ms(r.started_at))}>${r.started_at ? hms(ms(r.started_at)) : ''}</span>
    <span class="t2">${several && r.run_id ? html`<button type="button" class="lk" aria-pressed=${String(shown)}
      onClick=${pick}>attempt ${r.attempt}</button> ` : ''}
      <b class=${`x-${r.outcome}`}>${word(r.outcome)}</b>${r.instance && html` on <${On} id=${r.instance}
        />`}${r.attempt > 0 && r.trigger !== 'schedule' && `, ${cause(r.trigger)}`}
      ${r.error && html`: <${Txt}>${r.error}<//>`}${r.left_processes > 0
        && `; soloist ended ${many(r.left_processes, 'process', 'processes')} that it left in the background`}${r.by
        && html`; ${r.outcome === 'cancelled' ? 'cancelled' : 'asked for'} by <${Txt}>${r.by}<//>`}${r.count > 1
        && `; this record stands for ${r.count} occurrences`}</span>
    <span class="num nw t2">${end && `${end} · `}${r.outcome === 'running' ? html`<${Since} t=${ms(r.started_at)} />`
      : r.duration_ms != null ? took(r.duration_ms) : ''}</span></li>`;
}

// ---- why

const DECIDED = { won: 'started it', lost: 'another was first', settled: 'came when it was decided',
  quarantined: 'had to wait for the store', draining: 'takes nothing new', store_error: 'got no answer of the store' };

/** Each instance's decision on a common axis of milliseconds; the instant is at its left end. */
function Why({ why, at }) {
  const rel = (d) => ms(d.at) - at;
  const near = why.decisions.filter((d) => rel(d) >= 0 && rel(d) < 60_000).map(rel);
  const span = Math.max(5, ...near);
  const rows = why.decisions.map((d) => {
    const x = rel(d);
    const won = d.decision === 'won';
    return html`<tr key=${d.instance + d.at + d.decision} class=${won ? 'won' : ''}><th scope="row"><${On}
      id=${d.instance} /></th>
      <td class="ax">${x >= 0 && x <= span && html`<svg width="76" height="12" aria-hidden="true"><path d="M2 6h74"
        stroke="var(--line2)" /><path d="M2 1v10" stroke="var(--tx3)" />
        <circle cx=${2 + (x / span) * 68} cy="6" r=${won ? 4.5 : 3.5} fill=${won ? 'var(--ac)' : 'var(--raise)'}
          stroke=${won ? null : 'var(--tx3)'} stroke-width="1.5" /></svg>`}</td>
      <td class="num nw">${x < 60_000 && x > -60_000 ? `${x < 0 ? '−' : '+'}${took(Math.abs(x))}` : when(ms(d.at),
        now())}</td>
      <td><b>${DECIDED[d.decision] || clean(d.decision)}</b>${d.detail && html`: <${Txt}>${d.detail}<//>`}</td></tr>`;
  });
  const silent = (why.silent || []).map((s) => html`<tr key=${`s${s.instance}`}><th scope="row"><${On} id=${s.instance}
    /></th><td class="ax"></td><td></td><td>${clean(s.reason)}</td></tr>`);
  const out = (why.unanswered || []).map((s) => html`<tr key=${`u${s.instance}`}><th scope="row"><${On} id=${s.instance}
    /></th><td class="ax"></td><td></td>
    <td>the store did not answer it from ${hms(ms(s.from))} to ${hms(ms(s.until))}</td></tr>`);
  if (!rows.length && !silent.length && !out.length) return html`<p class="t2">${at > now() ? 'It is not due yet.'
    : 'Decisions are kept for 3 days; none is kept of this occurrence.'}</p>`;
  return html`<table class="why"><caption class="sr">What each instance decided</caption><thead
    class="sr"><tr><th>Instance</th><th>On the axis</th><th>After</th><th>Decision</th></tr></thead>
    <tbody>${rows}${silent}${out}</tbody></table>`;
}

// ---- output

/** Follows the output of a run while it runs. Gives its end, how it ended, and what is lacking before it. */
function useOutput(job, run) {
  const [state, set] = useState({ text: '', ended: false, error: null, cut: false, left: false });
  const id = run?.run_id;
  const running = run?.outcome === 'running';
  useEffect(() => {
    if (!id) return undefined;
    const stop = new AbortController();
    // `left`: the page has not asked for what is before, or has let go of it.
    let [text, from, cut, left] = ['', 0, false, false];
    let timer = null;
    const tell = (ended) => {
      clearTimeout(timer);
      timer = null;
      set({ text, ended, error: null, cut, left });
    };
    const add = (o) => {
      text += o.data;
      from = o.next;
      cut ||= o.truncated;
      if (text.length > HELD) [text, left] = [text.slice(-HELD / 2), true];
      // To draw much takes long.
      if (o.ended || text.length < AT_ONCE) tell(o.ended);
      else timer ??= setTimeout(() => tell(false), DRAWN_MS);
      return o.ended;
    };
    const path = () => `runs/${enc(id)}/output?job=${enc(job)}&from=${from}`;
    const pause = (length) => new Promise((r) => setTimeout(r, length));
    /** As it comes, also the rest of it when the run has ended. */
    const follow = async () => {
      for await (const e of events(`${path()}&follow=1`, { signal: stop.signal })) {
        if (e.data && add({ ...e.data, data: marked(e.data) })) return true;
      }
      return false;
    };
    /** Of a long one, only the end. */
    const whole = async () => {
      if (!text && run.output_bytes > HELD) [from, left] = [run.output_bytes - HELD, true];
      for (;;) {
        const o = await ask(path(), { signal: stop.signal });
        o.data = marked(o);
        if (!text && left) {
          // The store keeps less than that, or not its end.
          if (o.from > from) left = false;
          else if (!o.data && o.ended) {
            [from, left] = [0, false];
            continue;
          }
        }
        // It began within a line, or within a character.
        if (!text && left) o.data = o.data.replace(/^[^\n]{0,4000}\n|^\ufffd+/, '');
        const before = from;
        if (add(o)) return true;
        // Its holder still stores the rest.
        if (from === before) await pause(1000);
      }
    };
    const read = async () => {
      let live = running;
      // It goes on where it was.
      for (let wait = 500; !stop.signal.aborted; wait = Math.min(5000, wait * 2)) {
        const before = from;
        let error = null;
        try {
          if (await (live ? follow() : whole())) return;
        } catch (e) {
          error = e;
        }
        if (stop.signal.aborted) return;
        if (timer) tell(false);
        if (error) set({ text, ended: error.status === 404, error, cut, left });
        if (error?.status === 404) return;
        // All streams are taken, or the store is away.
        if (error?.status === 503) live = false;
        if (from !== before) wait = 500;
        await pause(wait);
      }
    };
    read();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
    // Not when the run ends: what follows it tells of its end, too.
  }, [job, id]);
  return state;
}

function OutputBox({ job, run }) {
  const { text, ended, error, cut, left: before } = useOutput(job, run);
  const [find, setFind] = useState('');
  // Of a long output, and of one that went wrong, the end says most.
  const [follow, setFollow] = useState(run.outcome !== 'succeeded' || run.output_bytes > HELD);
  const pre = useRef();
  useLayoutEffect(() => {
    if (follow) pre.current.scrollTop = pre.current.scrollHeight;
  }, [text, follow]);
  const q = find.trim().toLowerCase();
  useEffect(() => {
    if (q) pre.current.querySelector('mark')?.scrollIntoView({ block: 'nearest' });
  }, [q]);
  const shown = written(text);
  const hits = q ? shown.toLowerCase().split(q).length - 1 : 0;
  const empty = error ? (error.status === 404 ? 'This output is no longer kept.' : clean(error.message)) : ended
    || run.outcome !== 'running' ? 'It wrote nothing.' : 'It wrote nothing yet.';
  return html`<h3 class="h2">Output<small>${run.outcome === 'running' ? 'live' : run.output_bytes != null
    ? `${bytes(run.output_bytes)} in all` : ''}${before ? '; only its end is shown' : cut || run.output_truncated
      ? '; only its end is kept' : ''}</small></h3>
    <div class="outw"><div class="ob"><${Icon} k="search" c="s-planned" />
      <input id="find" type="text" placeholder="Search the output" aria-label="Search the output" value=${find}
        onInput=${(e) => setFind(e.target.value)}
        onKeyDown=${(e) => e.key === 'Escape' && (setFind(''), e.target.blur(), e.stopPropagation())} />
      ${q && html`<span class="t3 nw" role="status">${many(hits, 'place')}</span>`}
      <${Copy} text=${visible(unmarked(text))}>Copy<//>
      <label class="t2"><input type="checkbox" checked=${follow} onChange=${(e) => setFollow(e.target.checked)}
        />Follow</label></div>
    <pre ref=${pre} tabindex="0" role="log" aria-live="off" aria-label="Output" onWheel=${(e) => e.deltaY < 0
      && setFollow(false)}>${text ? html`<${Output} text=${shown} find=${q} />`
    : html`<span class="t3">${empty}</span>`}</pre></div>
    ${text && error && html`<p class="note x-failed" role="status"><${Icon} k="failed" /><span>More of it cannot be had:
      ${' '}${clean(error.message)}${error.status === 404 ? '' : '; the page asks again'}</span></p>`}`;
}

// ---- resources, identity

function Meter({ name, value, typical, write }) {
  if (value == null) return null;
  const width = typical ? Math.min(100, (value / typical) * 55) : 55;
  return html`<div><span class="t3">${name}</span> <b>${write(value)}</b> ${typical != null && html`<span
    class="t3">typical ${write(typical)}</span>`}
    <div class="meter"><i style=${{ width: `${width}%` }}></i>${typical != null && html`<u></u>`}</div></div>`;
}

function Resources({ run, items }) {
  if (run.cpu_ms == null && run.peak_memory_bytes == null) return null;
  const typical = (k) => median(items.filter((i) => i.outcome === 'succeeded' && i[k] != null).map((i) =>
    i[k]).sort((a, b) => a - b));
  return html`<h3 class="h2">Resources</h3><div class="two meters"><${Meter} name="CPU" value=${run.cpu_ms}
    typical=${typical('cpu_ms')} write=${took} />
    <${Meter} name="Peak memory" value=${run.peak_memory_bytes} typical=${typical('peak_memory_bytes')} write=${bytes}
      /></div>`;
}

export function Occurrence({ job, at, items, round }) {
  useTopics('link');
  const iso = new Date(at).toISOString();
  const why = useLoaded((signal) => ask(`jobs/${enc(job.job)}/why/${at}`, { signal }), [job.job, at], [round]);
  // Instances write their decisions down a little after they act on them.
  const soon = why.data && !why.data.decisions.some((d) => d.decision === 'won') && Math.abs(now() - at) < 60_000;
  const open = job.running.filter((r) => ms(r.occurrence) === at);
  const wait = job.awaited.find((a) => ms(a.occurrence) === at);
  // The verdict says for how long it runs already, or when it goes on.
  const moves = soon || open.length > 0 || !!wait;
  useEffect(() => {
    if (!moves) return undefined;
    const timer = setTimeout(why.again, 1500);
    return () => clearTimeout(timer);
  }, [moves, why.data]);
  const [picked, pick] = useState(null);
  const runs = why.data?.runs || items.filter((i) => ms(i.occurrence) === at);
  const all = [...runs.filter((r) => !open.some((o) => o.run_id === r.run_id)), ...open].sort((a, b) =>
    a.attempt - b.attempt);
  // What ended meanwhile is not known in full yet: the answer about it is under way.
  const ended = (r) => (r.outcome === 'running' && !open.length && job.recent?.find((x) => ms(x.occurrence) === at
    && x.attempt === r.attempt)) || r;
  const list = all.map((r) => ({ ...r, ...ended(r) }));
  const last = list[list.length - 1];
  const shown = list.find((r) => r.run_id && r.run_id === picked) || [...list].reverse().find((r) => r.run_id);
  const state = wait ? 'retry' : last?.outcome ?? (at > now() ? 'planned' : 'unknown');
  const panel = useRef();
  useEffect(() => panel.current?.focus({ preventScroll: true }), []);
  const command = commandLine('why', [job.job, iso]);
  return html`<aside class="side" aria-label="Occurrence" ref=${panel} tabindex="-1">
    <div class="hd"><${Icon} k=${state} /><h2>${when(at, now())}</h2><span class=${`x-${state}`}>${state === 'planned'
      ? 'planned' : last || wait ? word(state) : ''}</span><span class="sp"></span>
      <button type="button" class="btn q i" aria-label="Close" data-tip="Close (Esc)" onClick=${() => setQuery({
        o: '' })}><${Icon} k="close" /></button></div>
    ${why.error && html`<${Failed} error=${why.error} again=${why.again} />`}
    <p class="t2 verd"><${Txt}>${why.data?.verdict || (why.error ? '' : 'Asking …')}<//></p>
    <div class="hd acs">${open.length ? html`<${Btn} icon="cancelled" acts onClick=${() => act('cancel',
      job.job)}>Cancel …<//>`
    : html`<${Btn} icon="play" acts onClick=${() => act('trigger', job.job)}>Run again …<//>`}<${Copy}
      text=${location.href}>Copy link<//><${Copy} text=${command}>Copy command<//></div>
    ${list.length > 0 && html`<h3 class="h2">Attempts</h3><ol class="try">${list.map((r) => html`<${Attempt}
      key=${r.attempt} r=${r} several=${list.length > 1} shown=${r === shown} pick=${() => pick(r.run_id)} />`)}
      ${wait && html`<li><${Icon} k="planned" /><span>${hms(ms(wait.at))}</span><span
        class="t2">attempt ${wait.attempt}<${Live} f=${(n) => (halted(known) ? '' : `, in ${left(ms(wait.at) - n)}`)}
          /></span><span></span></li>`}</ol>`}
    ${why.data && html`<h3 class="h2">Why<small>how long after the planned time</small></h3><${Why} why=${why.data}
      at=${at} />`}
    ${(why.data?.problems || []).map((p) => html`<p class="note"><${Icon} k="slow" /><${Txt}>${p}<//></p>`)}
    ${shown && html`<${Resources} run=${shown} items=${items} /><${OutputBox} key=${shown.run_id} job=${job.job}
      run=${shown} />`}
    <h3 class="h2">Identity</h3><dl class="kv">
      ${shown?.fencing_token && html`<dt>Fencing token</dt><dd class="mono">${clean(shown.fencing_token)}</dd>`}
      ${shown?.instance && html`<dt>Instance</dt><dd class="mono"><${Txt}>${shown.instance}<//></dd><dt>Host</dt><dd
        class="mono"><${Txt}>${shown.host ?? short(shown.instance)}<//></dd>`}
      <dt>Occurrence</dt><dd class="mono">${iso}</dd>
      ${why.data?.local && html`<dt>Local</dt><dd class="mono">${clean(why.data.local)}</dd>`}
      ${shown && html`<dt>Run</dt><dd
        class="mono">${clean(shown.run_id)}</dd><dt>Trigger</dt><dd>${cause(shown.trigger)}</dd>`}
      ${shown?.lateness_ms != null && shown.attempt === 1
        && html`<dt>Late</dt><dd>${took(shown.lateness_ms)}</dd>`}</dl>
  </aside>`;
}
