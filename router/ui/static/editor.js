// A text area with line numbers, colors below it, and marked places.
import { html, useLayoutEffect, useMemo, useRef } from "./lib.js";
import { classes } from "./parts.js";
import { highlighted } from "./python.js";

const INDENT = "    ";

// `mark`: {line, column, end_line, end_column, message}, from 1, columns in characters, or null.
// `mark.show` changes when the marked line shall come into view.
export function Editor({ value, onInput, readOnly, mark, label, describedBy, onRun }) {
  const area = useRef();
  const box = useRef();
  const left = useRef(false); // Escape was pressed: Tab leaves
  const lines = useMemo(() => highlighted(value), [value]);
  const marked = mark?.line && mark.line <= lines.length ? mark : null;

  useLayoutEffect(() => {
    if (!marked) return;
    const line = box.current.querySelector(".line-marked");
    const at = line.offsetTop - box.current.clientHeight / 2;
    if (line.offsetTop < box.current.scrollTop + 20 || at + 40 > box.current.scrollTop) box.current.scrollTop = Math.max(0, at);
  }, [mark?.show, marked?.line]);

  const pressed = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      onRun?.();
    } else if (readOnly || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    } else if (event.key === "Tab" && !left.current) {
      event.preventDefault();
      indent(area.current, event.shiftKey);
    } else if (event.key === "Enter") {
      event.preventDefault();
      insert(area.current, `\n${nextIndent(area.current)}`);
    }
    left.current = event.key === "Escape" || (left.current && event.key === "Shift");
  };

  return html`<div class=${classes("editor", readOnly && "editor-fixed")} ref=${box}>
    <div class="editor-inner">
      <div class="editor-numbers" aria-hidden="true">
        ${lines.map((_, at) => html`<span key=${at} class=${marked?.line === at + 1 && "number-marked"}>${at + 1}</span>`)}
      </div>
      <div class="editor-text">
        <pre aria-hidden="true">${lines.map(
          (tokens, at) => html`<${Line} key=${at} tokens=${tokens} mark=${marked?.line === at + 1 ? marked : null} />`,
        )}</pre>
        <textarea
          ref=${area}
          value=${value}
          aria-label=${label}
          aria-describedby=${describedBy}
          aria-invalid=${marked ? "true" : undefined}
          readOnly=${readOnly}
          wrap="off"
          spellcheck=${false}
          autocapitalize="off"
          autocomplete="off"
          autocorrect="off"
          onInput=${(event) => onInput(event.target.value)}
          onKeyDown=${pressed}
        ></textarea>
      </div>
    </div>
  </div>`;
}

function Line({ tokens, mark }) {
  const shown = mark ? cut(tokens, mark) : tokens;
  return html`<div class=${mark ? "line line-marked" : "line"}>${shown.map(([kind, text, fault], at) =>
    kind || fault ? html`<span key=${at} class=${classes(kind && `py-${kind}`, fault && "fault")}>${text}</span>` : text,
  )}${mark?.message && html`<span class="lens">${mark.message}</span>`}${"\n"}</div>`;
}

// Splits tokens at the mark's columns.
function cut(tokens, { line, column, end_line, end_column }) {
  if (!column) return tokens;
  const end = end_line === line && end_column > column ? end_column : end_line > line ? Infinity : column + 1;
  const shown = [];
  let at = 1;
  for (const [kind, text] of tokens) {
    const letters = Array.from(text); // a character may take two code units
    for (const [from, to, fault] of [[at, column, false], [column, end, true], [end, Infinity, false]]) {
      const piece = letters.slice(Math.max(0, from - at), Math.max(0, to - at)).join("");
      if (piece) shown.push([kind, piece, fault]);
    }
    at += letters.length;
  }
  if (at <= column) shown.push(["", " ", true]); // the fault is the line's end
  return shown;
}

// Inserts as if it had been typed, so that it can be undone.
function insert(area, text) {
  if (!document.execCommand("insertText", false, text)) {
    area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
    area.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

function nextIndent({ value, selectionStart }) {
  const line = value.slice(value.lastIndexOf("\n", selectionStart - 1) + 1, selectionStart);
  return /^[ \t]*/.exec(line)[0] + (/:\s*(#.*)?$/.test(line) ? INDENT : "");
}

function indent(area, back) {
  const { value, selectionStart, selectionEnd } = area;
  const begin = value.lastIndexOf("\n", selectionStart - 1) + 1;
  const chosen = value.slice(begin, selectionEnd);
  if (!back && selectionStart === selectionEnd) {
    const column = selectionStart - begin;
    insert(area, " ".repeat(INDENT.length - (column % INDENT.length)));
    return;
  }
  const moved = chosen.replace(/^/gm, back ? "" : INDENT);
  const text = back ? chosen.replace(/^ {1,4}/gm, "") : moved;
  if (text === chosen) return;
  area.setSelectionRange(begin, selectionEnd);
  insert(area, text);
  if (selectionStart === selectionEnd) {
    const at = Math.max(begin, selectionStart + text.length - chosen.length);
    area.setSelectionRange(at, at);
  } else area.setSelectionRange(begin, begin + text.length);
}
