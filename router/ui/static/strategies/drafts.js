// Sources that were edited and are not loaded yet, by the name that their strategy had at first.
// They stay in this tab until it is closed.
import { useEffect, useState } from "../lib.js";

const SLOT = "microserve.drafts";
const watchers = new Set();
let drafts = read();

function read() {
  try {
    return new Map(Object.entries(JSON.parse(sessionStorage.getItem(SLOT)) ?? {}));
  } catch {
    return new Map();
  }
}

function changed() {
  drafts = new Map(drafts);
  try {
    sessionStorage.setItem(SLOT, JSON.stringify(Object.fromEntries(drafts)));
  } catch {
    // more than the browser keeps: they last until the page is left
  }
  for (const watcher of watchers) watcher(drafts);
}

export function putDraft(name, text) {
  drafts.set(name, text);
  changed();
}

export function dropDraft(name) {
  drafts.delete(name);
  changed();
}

export function useDrafts() {
  const [seen, see] = useState(drafts);
  useEffect(() => {
    watchers.add(see);
    see(drafts);
    return () => watchers.delete(see);
  }, []);
  return seen;
}

export const TEMPLATE = `from collections.abc import AsyncGenerator

from router import Chunk, Cluster, Request, strategy


@strategy
async def NAME(request: Request, cluster: Cluster) -> AsyncGenerator[Chunk, None]:
    """Send each request to the engine with the least work."""
    engine = cluster.engines.least_loaded()
    async for chunk in engine.start_generate(request):
        yield chunk
`;

// A name like `name` that nobody has.
export function freeName(name, taken) {
  for (let number = 1; ; number++) {
    const tried = number === 1 ? name : `${name}_${number}`;
    if (!taken.has(tried)) return tried;
  }
}
