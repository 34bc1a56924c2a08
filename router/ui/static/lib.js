// The libraries that views use, in one place.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { h, render } from "./vendor/preact.js";
export {
  useCallback,
  useEffect,
  useErrorBoundary,
  useId,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "./vendor/hooks.js";

// Tagged templates instead of JSX. Values become text nodes and attributes, never markup.
export const html = htm.bind(h);
