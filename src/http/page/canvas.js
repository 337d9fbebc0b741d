// What canvases need: the colours of the theme, sharp pixels, and signs.
import { ICONS } from './icons.js';

const NAMES = ['bg', 'raise', 'sunk', 'line', 'line2', 'tx', 'tx2', 'tx3', 'ac', 'ok', 'okb', 'bad', 'bad-t', 'warn',
  'lost', 'run', 'off'];
let palette = null;
const forget = () => {
  palette = null;
};
addEventListener('themechange', forget);
matchMedia('(prefers-color-scheme:dark)').addEventListener('change', forget);

/** The colours as the theme has them now, by their names in the style sheet. */
export function colours() {
  if (palette) return palette;
  const probe = document.createElement('i');
  document.body.append(probe);
  palette = { font: getComputedStyle(document.body).fontFamily };
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    palette[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return palette;
}

const HUE = { succeeded: 'okb', running: 'run', unknown: 'lost', lease_lost: 'lost', missed: 'warn', failed: 'bad',
  timed_out: 'bad', crashed: 'bad', retry: 'bad', slow: 'warn' };
export const hue = (outcome) => HUE[outcome] || 'off';

/** Fits the canvas to `w` by `h` and gives a context that counts CSS pixels. */
export function fit(canvas, w, h) {
  const ratio = devicePixelRatio || 1;
  const [pw, ph] = [Math.round(w * ratio), Math.round(h * ratio)];
  if (canvas.width !== pw || canvas.height !== ph) {
    [canvas.width, canvas.height] = [pw, ph];
    canvas.style.width = `${w}px`;
    canvas.style.height = `${h}px`;
  }
  const ctx = canvas.getContext('2d');
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, w, h);
  ctx.font = `11px ${colours().font}`;
  ctx.textBaseline = 'alphabetic';
  return ctx;
}

const paths = new Map();
/** A sign of `size` pixels at its upper left corner. */
export function sign(ctx, k, x, y, size, colour) {
  if (!paths.has(k)) paths.set(k, (ICONS[k] || ICONS.planned).map((p) => ({ ...p, path: new Path2D(p.d) })));
  ctx.save();
  ctx.translate(x, y);
  ctx.scale(size / 16, size / 16);
  ctx.fillStyle = ctx.strokeStyle = colour;
  ctx.lineCap = ctx.lineJoin = 'round';
  for (const p of paths.get(k)) {
    if (p.fill) ctx.fill(p.path);
    else {
      ctx.lineWidth = p.w * 1.3;
      ctx.setLineDash(p.dash ? p.dash.split(' ').map(Number) : []);
      ctx.stroke(p.path);
    }
  }
  ctx.restore();
}

export function line(ctx, x1, y1, x2, y2, colour, width = 1, dash = []) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
  ctx.setLineDash([]);
}

/** By colour. */
const hatches = new Map();
/** Slanted lines, for times in which something was out of reach. */
export function hatched(ctx, x, y, w, h, colour) {
  if (!hatches.has(colour)) {
    const tile = Object.assign(document.createElement('canvas'), { width: 6, height: 6 });
    const t = tile.getContext('2d');
    t.strokeStyle = colour;
    t.lineWidth = 1.6;
    t.globalAlpha = 0.4;
    t.beginPath();
    for (const d of [-6, 0, 6]) {
      t.moveTo(d, 6);
      t.lineTo(d + 6, 0);
    }
    t.stroke();
    hatches.set(colour, ctx.createPattern(tile, 'repeat'));
  }
  ctx.fillStyle = hatches.get(colour);
  ctx.fillRect(x, y, w, h);
}
