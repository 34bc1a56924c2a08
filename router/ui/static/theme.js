// Light or dark: as the system says, until the user chooses.

const STORED = "microserve.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const watchers = new Set();

const chosen = () => localStorage.getItem(STORED);

export const isDark = () => (chosen() ?? (system.matches ? "dark" : "light")) === "dark";

export function toggleTheme() {
  localStorage.setItem(STORED, isDark() ? "light" : "dark");
  apply();
}

// Calls `watcher` after each change; returns what ends this.
export function themeChanges(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function apply() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const watcher of watchers) watcher();
}

system.addEventListener("change", apply);
apply();
