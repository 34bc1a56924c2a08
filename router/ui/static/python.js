// Splits Python source into colored tokens. It knows the lexical grammar, not the syntax: what is
// no Python gets some colors, too.

const KEYWORDS = new Set(
  ("False None True and as assert async await break class continue def del elif else except finally " +
    "for from global if import in is lambda nonlocal not or pass raise return try while with yield " +
    "match case type").split(" "),
);
const BUILTINS = new Set(
  ("abs all any bool bytes dict enumerate filter float frozenset getattr hasattr int isinstance len " +
    "list map max min next object print property range repr reversed round self set sorted str sum " +
    "super tuple type zip Exception KeyError RuntimeError TimeoutError TypeError ValueError").split(" "),
);
const SOFT = new Set(["match", "case", "type"]); // keywords only at the begin of a line, before a name
const LONGEST = 300_000; // characters; longer sources have no colors

const TOKEN = new RegExp(
  [
    /(?<comment>#[^\n]*)/,
    /(?<string>(?:[rbfuRBFU]{0,2})(?:"""|'''|"(?:\\[^\n]|[^"\\\n])*"?|'(?:\\[^\n]|[^'\\\n])*'?))/,
    /(?<number>\b(?:0[xXoObB][\da-fA-F_]+|\d[\d_]*(?:\.[\d_]*)?(?:[eE][+-]?\d+)?j?))/,
    /(?<decorator>@[\p{L}_][\p{L}\p{N}_.]*)/,
    /(?<name>[\p{L}_][\p{L}\p{N}_]*)/,
    /(?<space>[ \t]+)/,
    /(?<other>[^\n])/,
  ]
    .map((one) => one.source)
    .join("|"),
  "uy",
);

// Returns the lines of `source`, each a list of [class, text]; the class may be "".
export function highlighted(source) {
  if (source.length > LONGEST) return source.split("\n").map((line) => [["", line]]);
  const lines = [[]];
  const add = (kind, text) => {
    for (const [number, piece] of text.split("\n").entries()) {
      if (number) lines.push([]);
      const line = lines.at(-1);
      if (!piece) continue;
      if (line.length && line.at(-1)[0] === kind) line.at(-1)[1] += piece;
      else line.push([kind, piece]);
    }
  };
  let before = ""; // the last name, for what is defined
  let first = true; // nothing but space stands before it in this line
  for (let at = 0; at < source.length; ) {
    if (source[at] === "\n") {
      lines.push([]);
      at++;
      first = true;
      continue;
    }
    TOKEN.lastIndex = at;
    const { 0: text, groups } = TOKEN.exec(source) ?? { 0: source[at], groups: { other: source[at] } };
    const quotes = groups.string && /("""|''')$/.exec(text);
    if (quotes && text.length - quotes.index === 3 && !/^[a-zA-Z]*("""|''')("""|''')$/.test(text)) {
      const end = closing(source, at + text.length, quotes[1]);
      add("string", source.slice(at, end));
      at = end;
    } else {
      at += text.length;
      const decorator = groups.decorator && first;
      const kind = groups.name
        ? nameKind(text, before, source, at, first)
        : groups.decorator && !decorator
          ? ""
          : (Object.keys(groups).find((name) => groups[name] !== undefined) ?? "");
      add(kind === "space" || kind === "other" ? "" : kind, text);
    }
    if (groups.name) before = text;
    else if (!groups.space) before = "";
    if (!groups.space) first = false;
  }
  return lines;
}

function nameKind(text, before, source, end, first) {
  if (before === "def" || before === "class") return "defined";
  if (SOFT.has(text) && !(first && /^[ \t]+[\p{L}_"'([{]/u.test(source.slice(end, end + 40)))) {
    return BUILTINS.has(text) ? "builtin" : "";
  }
  if (KEYWORDS.has(text)) return "keyword";
  return BUILTINS.has(text) ? "builtin" : "";
}

// The end of a string with three quotation marks that is open from `at` on.
function closing(source, at, quotes) {
  for (; at < source.length; at++) {
    if (source[at] === "\\") at++;
    else if (source.startsWith(quotes, at)) return at + 3;
  }
  return source.length;
}

// The name of the strategy in `source`: of the last function below @strategy; "" if there is none.
export function strategyName(source) {
  const found = [...source.matchAll(/^@strategy\b[^\n]*\n(?:@[^\n]*\n)*(?:async[ \t]+)?def[ \t]+([\p{L}_][\p{L}\p{N}_]*)/gmu)];
  return found.at(-1)?.[1] ?? "";
}

// `source` with its strategy `name` called `other`.
export function renamed(source, name, other) {
  const escaped = name.replace(/[^\p{L}\p{N}_]/gu, "\\$&");
  return source
    .replace(new RegExp(`(def[ \\t]+)${escaped}(?=[ \\t]*\\()`, "u"), `$1${other}`)
    .replace(new RegExp(`(["'])${escaped}\\1`, "gu"), `$1${other}$1`);
}
