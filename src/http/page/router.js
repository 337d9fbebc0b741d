// The address of what is seen: `#/screen/name?key=value`. Each thing has one, so that a colleague can be sent there.
import { useLayoutEffect, useState } from './base.js';

export function here() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [screen = '', name] = path.split('/');
  let arg = name;
  try {
    arg = name && decodeURIComponent(name);
  } catch {
    // A name that is no such text is looked up as it stands.
  }
  return { screen: screen || 'overview', arg, query: Object.fromEntries(new URLSearchParams(query)) };
}

const listeners = new Set();
const tell = () => listeners.forEach((f) => f());
addEventListener('hashchange', tell);

export function useRoute() {
  const [route, set] = useState(here);
  // At once: an address that changes before the next frame would be missed.
  useLayoutEffect(() => {
    const f = () => set(here());
    listeners.add(f);
    return () => listeners.delete(f);
  }, []);
  return route;
}

export const link = (screen, arg, query) => {
  const q = new URLSearchParams(Object.entries(query || {}).filter(([, v]) => v != null && v !== ''));
  return `#/${screen}${arg ? `/${encodeURIComponent(arg)}` : ''}${q.size ? `?${q}` : ''}`;
};
export const jobLink = (job, occurrence) => link('job', job, { o: occurrence });
export const go = (hash) => {
  location.hash = hash;
};

/** Changes keys of the address without a step in the browser's history. */
export function setQuery(change) {
  const { screen, arg, query } = here();
  const hash = link(screen, arg, { ...query, ...change });
  if (hash === location.hash) return;
  history.replaceState(null, '', hash);
  tell();
}

/** The address of what is seen, for a colleague: under the public address if the server has one. */
export const address = (publicUrl) => (publicUrl ? `${publicUrl.replace(/\/$/, '')}/${location.hash}` : location.href);
