import { html } from "../lib.js";

export default { name: "requests", title: "Requests", View: () => html`<p>…</p>` };
