// What every module draws with.
import { h, Fragment, render, Component } from './vendor/preact.js';
import htm from './vendor/htm.js';

export { h, Fragment, render, Component };
export { useState, useEffect, useLayoutEffect, useRef, useMemo } from './vendor/hooks.js';
export const html = htm.bind(h);
