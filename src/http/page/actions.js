// What a person may do to the fleet. Each act asks once, says what it will do, and shows the command that does the
// same.
import { html, useEffect, useLayoutEffect, useRef, useState } from './base.js';
import { ask, forbidden, known, now, onEvent, useTopics } from './store.js';
import { clean, commandLine, left, many, meant, ms, when, zoneName } from './format.js';
import { Icon } from './icons.js';
import { halted } from './judge.js';
import { Copy, Txt, say, useLoaded } from './parts.js';
import { go, jobLink } from './router.js';

let show = () => {};
/** Opens the dialog of an act on a job, or on an instance. */
export const act = (kind, target, more) => show({ kind, target, ...more });

/** Within so long a run that was triggered is opened, ms. */
const FOLLOWED_MS = 30_000;
const random = () => Array.from(crypto.getRandomValues(new Uint8Array(5)), (b) =>
  'abcdefghjkmnpqrstuvwxyz23456789'[b % 31]).join('');
const iso = (t) => new Date(t).toISOString();

/** How many occurrences of the job lie between now and `until`, asked of the schedules. */
function Affected({ job, until }) {
  const { data } = useLoaded(async (signal) => {
    await new Promise((r) => setTimeout(r, 250));
    const q = new URLSearchParams({ job, from: iso(now()), to: iso(until), limit: '1000' });
    return signal.aborted ? null : ask(`plan?${q}`, { signal });
  }, [job, Math.round(until / 1000)]);
  const waits = known.jobs.get(job)?.awaited.length;
  if (!data) return null;
  const n = data.planned.length;
  return html` ${data.truncated ? `More than ${n} planned occurrences` : n ? many(n, 'planned occurrence')
    : 'No planned occurrence'}
    ${n <= 1 && !data.truncated ? ' is' : ' are'} skipped${waits ? '; a retry waits until then' : ''}.`;
}

const when2 = (t) => `${when(t, now())} ${zoneName}`;

// Each act: its question, what it does, its fields, what is sent, and the options of the command line. `v` has the
// fields' values.
const ACTS = {
  trigger: {
    title: (n) => html`Run <${Txt}>${n}<//> now?`,
    text: (job) => `One instance will run it${job?.schedule.length ? ', beside the schedule' : ''}.${halted(known)
      ? ` ${halted(known)}.` : ''}${job?.paused ? ' A pause does not prevent that.'
      : ''}${
      job?.running.length ? ' An attempt runs now; the job’s overlap rule decides.' : ''}`,
    start: () => ({ key: `page-${random()}` }),
    fields: [{ name: 'key', label: 'Key', hint: () =>
      'The same key runs the job only once within 7 days, so two clicks are one run.' }],
    body: (v) => (v.key ? { key: v.key } : {}),
    options: (v) => (v.key ? { '--key': v.key } : {}),
    button: (n) => html`Trigger <${Txt}>${n}<//>`,
    done: (a) => (a.known ? 'A trigger with this key was there already; it runs only once.' : 'Triggered.'),
  },
  pause: {
    title: (n) => html`Pause <${Txt}>${n}<//> on the whole fleet?`,
    text: (job) => `${job?.paused ? `It is paused already${job.paused.reason ? `: “${clean(job.paused.reason)}”`
      : ''}. This takes the place of that. ` : ''}What runs goes on. Occurrences until then end in the history as skipped, with your reason.${
      job?.awaited.length ? ' A retry waits until the pause is over.' : ''}`,
    start: () => ({ reason: '', until: '' }),
    fields: [
      { name: 'reason', label: 'Reason, shown to everybody' },
      { name: 'until', label: 'Until', placeholder: 'until it is resumed; or 2h, tomorrow 06:00, 2026-12-24T18:00',
        hint: (v, n) => {
        if (!v.until.trim()) return 'Without a time it stays paused until somebody resumes it.';
        const t = meant(v.until, now());
        if (t == null) return html`<span class="x-failed">That is no time. Write 2h, tomorrow 06:00, or
          2026-12-24T18:00.</span>`;
        if (t <= now()) return html`<span class="x-failed">That is not in the future.</span>`;
        return html`${when2(t)}, in ${left(t - now())}.<${Affected} job=${n} until=${t} />`;
      } },
    ],
    wrong: (v) => v.until.trim() && !(meant(v.until, now()) > now()),
    body: (v) => ({ ...(v.until.trim() && { until: iso(meant(v.until, now())) }), ...(v.reason.trim() && {
      reason: v.reason.trim() }) }),
    options: (v) => {
      const t = meant(v.until, now());
      return { ...(t && { '--until': iso(t).replace('.000Z', 'Z') }), ...(v.reason.trim() && {
        '--reason': v.reason.trim() }) };
    },
    button: (n) => html`Pause <${Txt}>${n}<//>`,
    done: () => 'Paused.',
  },
  resume: {
    title: (n) => html`Resume <${Txt}>${n}<//>?`,
    text: (job) => (job?.paused ? `It is paused since ${when(ms(job.paused.since),
      now())}. Its occurrences start again; those that were skipped do not run later.`
      : 'It is not paused, so nothing will change.'),
    button: (n) => html`Resume <${Txt}>${n}<//>`,
    done: () => 'Resumed.',
  },
  skip: {
    title: (n) => html`Skip the next occurrences of <${Txt}>${n}<//>?`,
    text: (job) => `They end in the history as skipped.${job?.next ? ` The next is ${when2(ms(job.next))}.` : ''}${
      job?.skip ? ` So far ${many(job.skip, 'occurrence')} will be skipped: this number takes
        the place of that.` : ''}`,
    start: () => ({ n: '1' }),
    fields: [{ name: 'n', label: 'How many', type: 'number', hint: (v) => (v.n === '0'
      ? 'None: an earlier request is taken back.' : /^\d{1,6}$/.test(v.n) ? '0 takes an earlier request back.'
        : 'A whole number up to 999999.') }],
    wrong: (v) => !/^\d{1,6}$/.test(v.n),
    body: (v) => ({ n: Number(v.n) }),
    options: (v) => ({ '-n': v.n }),
    button: (n, v) => (v.n === '0' ? 'Skip none' : `Skip ${v.n}`),
    done: (a) => clean(a.detail || 'Noted.'),
  },
  cancel: {
    title: (n) => html`Cancel what runs of <${Txt}>${n}<//>?`,
    text: (job) => {
      const parts = [];
      for (const r of job?.running || []) parts.push(`attempt ${r.attempt} of ${when(ms(r.occurrence),
        now())} on ${clean(r.instance)}`);
      if (!parts.length && !job?.awaited.length) return 'Nothing runs now, so nothing will change.';
      const drop = job.awaited.length ? ` ${many(job.awaited.length, 'waiting attempt is',
        'waiting attempts are')} dropped.` : '';
      return `${parts.length
        ? `It ends ${parts.join(', ')}: SIGTERM now, SIGKILL after the job’s grace. It ends as cancelled and is not`
          + ' retried.' : ''}${drop}`;
    },
    button: () => 'Cancel what runs',
    done: () => 'Asked to end.',
  },
  drain: {
    title: (n) => html`Drain <${Txt}>${n}<//>?`,
    text: () => 'It claims nothing more and finishes what it runs. The others take its share.',
    instance: true,
    button: () => 'Drain it',
    done: () => 'Draining.',
  },
  undrain: {
    title: (n) => html`Undrain <${Txt}>${n}<//>?`,
    text: () => 'It claims occurrences again.',
    instance: true,
    button: () => 'Undrain it',
    done: () => 'It claims again.',
  },
};

function Ask({ kind, target, close }) {
  useTopics('jobs', 'session', 'link');
  const a = ACTS[kind];
  const [v, set] = useState(a.start ? a.start() : {});
  const [state, setState] = useState({});
  const job = a.instance ? null : known.jobs.get(target);
  const why = forbidden();
  const command = commandLine(kind, [target], a.options?.(v));
  const wrong = why || state.busy || a.wrong?.(v);
  const send = async (e) => {
    e.preventDefault();
    if (wrong) return;
    setState({ busy: true });
    const path = `${a.instance ? 'instances' : 'jobs'}/${encodeURIComponent(target)}/${kind}`;
    // Its run is opened, unless somebody goes elsewhere meanwhile.
    const here = location.hash;
    const off = kind === 'trigger' ? onEvent((event, data) => {
      if (event !== 'granted' || data.job !== target || data.trigger !== 'manual') return;
      off();
      if (location.hash === here) go(jobLink(target, ms(data.occurrence)));
    }) : () => {};
    setTimeout(off, FOLLOWED_MS);
    try {
      const answer = await ask(path, { body: a.body ? a.body(v) : {} });
      say(a.done(answer));
      setState({ done: a.done(answer) });
      setTimeout(close, 900);
    } catch (error) {
      const unknown = error.status ? ''
        : ' It is not known whether the request arrived; sending it again does no harm.';
      setState({ error: `${error.message}${error.hint ? `; ${error.hint}` : ''}${unknown}` });
      off();
    }
  };
  return html`<form onSubmit=${send} aria-labelledby="dt">
    <h2 id="dt">${a.title(target)}</h2>
    <p class="t2">${a.text(job)}</p>
    ${(a.fields || []).map((f) => html`<label key=${f.name}>${f.label}
      <input class="in" type=${f.type || 'text'} min="0" value=${v[f.name]} placeholder=${f.placeholder}
        autocomplete="off" maxlength="1000"
        aria-describedby=${f.hint ? `h-${f.name}` : null} onInput=${(e) => set({ ...v, [f.name]: e.target.value })}
          /></label>
      ${f.hint && html`<p class="t3" id=${`h-${f.name}`}>${f.hint(v, target)}</p>`}`)}
    <div class="cmd"><code>${clean(command)}</code><${Copy} text=${command}>Copy<//></div>
    ${why && html`<p class="note"><${Icon} k="key" />${why}</p>`}
    ${state.error && html`<p class="note x-failed" role="alert"><${Icon} k="failed"
      /><span>${clean(state.error)}</span></p>`}
    ${state.done && html`<p class="note" role="status"><${Icon} k="succeeded" />${state.done}</p>`}
    <div class="foot"><button type="button" class="btn q" onClick=${close}>Back</button>
      <button type="submit" class="btn p" aria-disabled=${wrong ? 'true' : null}>${state.busy ? 'Asking …'
        : a.button(target, v)}</button></div>
  </form>`;
}

/** Holds whatever dialog is open. It is mounted once. */
export function Dialogs() {
  const [open, set] = useState(null);
  const ref = useRef();
  const opened = useRef(0);
  show = (what) => {
    opened.current += 1;
    set({ ...what, n: opened.current });
  };
  // At once: see the palette.
  useLayoutEffect(() => {
    if (open && !ref.current.open) {
      ref.current.showModal();
      (ref.current.querySelector('input') || ref.current.querySelector('button[type=submit]'))?.focus();
    }
  }, [open]);
  // Of another screen it would say nothing.
  useEffect(() => {
    const left = () => ref.current.close();
    addEventListener('hashchange', left);
    return () => removeEventListener('hashchange', left);
  }, []);
  // What was asked in one dialog may be answered while the next is open.
  const close = () => open?.n === opened.current && ref.current?.close();
  return html`<dialog ref=${ref} aria-labelledby="dt" onClose=${() => ref.current?.open || set(null)} onClick=${(e) =>
    e.target === ref.current && close()}>
    ${open && html`<${Ask} key=${open.n} ...${open} close=${close} />`}
  </dialog>`;
}
