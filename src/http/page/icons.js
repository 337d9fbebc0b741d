// The signs of the page. Each is a list of paths in a box of 16; the timeline draws the same paths on its canvas.
import { html } from './base.js';

const f = (d) => ({ d, fill: true });
const s = (d, w = 1.7, dash) => ({ d, w, dash });
const circle = (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;

export const ICONS = {
  succeeded: [f(circle(8, 8, 3.6))],
  running: [s(circle(8, 8, 6), 1.7, '28 10'), f('M6.4 5.3v5.4L11 8z')],
  failed: [s('M4 4l8 8M12 4l-8 8', 2.4)],
  timed_out: [f('M3.5 2h9v1.6L9 8l3.5 4.4V14h-9v-1.6L7 8 3.5 3.6z')],
  crashed: [f('M10 1L3.5 9H7l-1 6 6.5-8.5H9z')],
  unknown: [s('M8 1.5L14.5 8 8 14.5 1.5 8z', 1.4), s('M6.4 6.6a1.6 1.6 0 1 1 2.4 1.4c-.5.3-.8.6-.8 1.2M8 11v.2', 1.3)],
  lease_lost: [s('M5 3.2A5.6 5.6 0 0 0 5 12.8M11 3.2a5.6 5.6 0 0 1 0 9.6', 2.1)],
  cancelled: [s(circle(8, 8, 5.4)), s('M5 8h6')],
  replaced: [s('M3.5 4l4 4-4 4M8.5 4l4 4-4 4')],
  skipped: [s('M2.5 9.5a5.5 5.5 0 0 1 11 0M11 8l2.5 2L15 7'), f(circle(8, 11.5, 1.6))],
  missed: [s('M3 3h10v10H3z', 1.7, '2.6 2.4')],
  paused: [s('M5.5 4v8M10.5 4v8', 2.6)],
  retry: [s('M13 8a5 5 0 1 1-1.8-3.8M11.6 1.4v3.1H8.5'), s('M8 5.6v3M8 10.5v.2', 1.6)],
  slow: [s('M8 2.2L14.5 13.5h-13z'), s('M8 6.5v3.2M8 11.6v.1')],
  planned: [s(circle(8, 8, 3.6), 1.5, '2 2')],
  off: [s(circle(8, 8, 4.6)), s('M4.8 11.2l6.4-6.4')],
  play: [f('M5 3.4v9.2L12.5 8z')],
  pause: [s('M5.8 4v8M10.2 4v8', 2.2)],
  logs: [s('M3 4.5h10M3 8h10M3 11.5h6')],
  search: [s(circle(7, 7, 4.2)), s('M10.3 10.3L14 14')],
  theme: [s(circle(8, 8, 5.5)), f('M8 2.5a5.5 5.5 0 0 1 0 11z')],
  close: [s('M4 4l8 8M12 4l-8 8')],
  drain: [s('M8 2v8M4.5 7L8 10.5 11.5 7M3 13.5h10')],
  drift: [s('M2 5h12M2 11h12M10 2L6 14')],
  clock: [s(circle(8, 8, 6)), s('M8 4.5V8l2.5 1.5')],
  go: [s('M3 8h9M8.5 4.5L12 8l-3.5 3.5')],
  fold: [s('M4 6l4 4 4-4')],
  unfold: [s('M6 4l4 4-4 4')],
  key: [s(circle(5.5, 8, 2.8)), s('M8.3 8H14v2.5M11.5 8v2')],
};

/** An icon beside text that says the same; `label` if nothing else says it. */
export function Icon({ k, c = '', label }) {
  const list = ICONS[k] || ICONS.planned;
  return html`<svg class=${`ic s-${k} ${c}`} viewBox="0 0 16 16" role=${label ? 'img' : null} aria-label=${label}
    aria-hidden=${label ? null : 'true'}>
    ${list.map((p) => html`<path d=${p.d} class=${p.fill ? 'f' : null} stroke-width=${p.w} stroke-dasharray=${p.dash}
      stroke-linecap=${p.dash ? 'butt' : null} />`)}
  </svg>`;
}
