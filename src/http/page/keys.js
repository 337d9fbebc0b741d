// Keys. A screen registers what its keys do; the shell has its own; `?` lists both.
import { useEffect } from './base.js';

const sets = [];
let prefix = null;

/**
 * Registers `{ key: [what it does, function] }` while the component is drawn. Later sets win over earlier ones. A key
 * of two letters, as `g o`, is typed one after the other.
 */
export function useKeys(name, keys, active = true) {
  useEffect(() => {
    if (!active) return undefined;
    const set = { name, keys };
    sets.push(set);
    return () => sets.splice(sets.indexOf(set), 1);
  });
}

/** All sets that are in force, the latest first. */
export const keySets = () => [...sets].reverse().sort((a, b) => (a.name === 'Everywhere') - (b.name === 'Everywhere'));

const NAMES = { Escape: 'Esc', ArrowLeft: '←', ArrowRight: '→', ArrowUp: '↑', ArrowDown: '↓' };

addEventListener('keydown', (e) => {
  const typed = NAMES[e.key] || e.key;
  const name = (e.ctrlKey || e.metaKey ? 'Ctrl ' : '') + (typed.length === 1 && (e.ctrlKey || e.metaKey)
    ? typed.toUpperCase() : typed);
  const inField = e.target.closest?.('input:not([type=checkbox]),textarea,select');
  const inDialog = document.querySelector('dialog[open]');
  if (e.altKey || (inDialog && name !== 'Ctrl K') || (inField && name !== 'Ctrl K' && name !== 'Esc')) return;
  const two = prefix && `${prefix} ${typed}`;
  prefix = null;
  const list = [...sets].reverse();
  const find = (k) => list.find((s) => s.keys[k])?.keys[k];
  const found = (two && find(two)) || find(name);
  if (found) {
    // Enter on a link or a button is its own.
    if (name === 'Enter' && e.target.closest?.('a,button')) return;
    if (found[1](e) !== false) e.preventDefault();
    return;
  }
  if (list.some((s) => Object.keys(s.keys).some((k) => k.startsWith(`${name} `)))) prefix = name;
});
