"use strict";
// Sorts and filters the table that is in the page already, and opens its cells. The state is in the address (#...), so
// that a link shows the same state to somebody else. Names come from strangers: they are set as text, never as HTML.
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const { columns, entries, runs, samples } = JSON.parse($("#data").textContent);

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }
  const isolated = (text) => make("bdi", {}, text);
  const facts = (rows) =>
    make("dl", {}, rows.map(([term, value]) => make("div", {}, make("dt", {}, isolated(term)), make("dd", {}, isolated(value)))));
  const plain = (head, rows) =>
    make("div", { className: "scroll" }, make("table", { className: "plain" },
      make("thead", {}, make("tr", {}, head.map((title) => make("th", { scope: "col" }, title)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((value) => make("td", {}, isolated(value))))))));

  // State, in the address

  const KEYS = ["sort", "q", "checkpoint", "method", "rule", "conditions", "cell"];
  function parse() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    return Object.fromEntries(KEYS.map((key) => [key, parameters.get(key) ?? ""]));
  }
  let state = parse();
  function update(changes) {
    state = { ...state, ...changes };
    const parameters = new URLSearchParams();
    for (const key of KEYS) if (state[key]) parameters.set(key, state[key]);
    try {
      history.pushState(null, "", `#${parameters}`);
    } catch {}  // some frames do not allow another address: the page works, but has no links to its states
    render();
  }
  addEventListener("hashchange", () => {
    if (location.hash && !location.hash.includes("=")) return;  // the link is to a place in the page
    state = parse();
    render();
  });
  addEventListener("popstate", () => { state = parse(); render(); });

  // The table

  const table = $("#board");
  const rows = entries.map((_, at) => $(`tr[data-row="${at}"]`, table));
  const heads = [...table.tHead.rows[0].cells];
  const keys = heads.map((head) => head.dataset.key);
  const isColumn = (key) => /^c\d+$/.test(key);
  const place = (key) => Number(key.slice(1));
  const texts = entries.map((entry) => [entry.checkpoint, entry.details, entry.label].join(" ").toLowerCase());

  function sortValue(row, key) {
    if (key === "entry") return entries[row].label.toLowerCase();
    return (isColumn(key) ? entries[row].cells[place(key)]?.sort : entries[row].cells[0]?.flips) ?? null;
  }
  const isShown = (row) => state.q.toLowerCase().split(/\s+/).every((word) => texts[row].includes(word))
    && ["checkpoint", "method", "rule", "conditions"].every((name) => !state[name] || state[name] === `=${entries[row][name]}`);
  const shown = () => entries.map((_, row) => row).filter(isShown);

  function render() {
    const [, key, direction] = state.sort.match(/^(.*):(ascending|descending)$/) ?? [];
    const sign = direction === "descending" ? -1 : 1;
    for (const body of table.tBodies) {  // the rows of a decision rule stay together
      const order = rows.map((_, row) => row).filter((row) => rows[row].parentElement === body);
      if (key && keys.includes(key)) {
        order.sort((a, b) => {
          const [one, other] = [sortValue(a, key), sortValue(b, key)];
          if (one === null || other === null) return (one === null) - (other === null) || a - b;  // missing values come last
          return sign * (typeof one === "string" ? one.localeCompare(other) : one - other) || a - b;
        });
      }
      const now = [...body.rows].filter((tr) => tr.dataset.row !== undefined);
      if (order.some((row, at) => now[at] !== rows[row])) body.append(...order.map((row) => rows[row]));
      body.hidden = !order.some(isShown);
    }
    heads.forEach((head) => head.setAttribute("aria-sort", head.dataset.key === key ? direction : "none"));
    rows.forEach((tr, row) => { tr.hidden = !isShown(row); });
    $("#status").textContent = `${shown().length} of ${rows.length} entries shown`;
    for (const control of form.elements) if (control.name && control.value !== state[control.name]) control.value = state[control.name];
    dialogs();
  }

  const form = $("#controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => update({ [target.name]: target.value }));
  table.tHead.addEventListener("click", ({ target }) => {
    const head = target.closest("button")?.closest("th");
    if (!head) return;
    const { key } = head.dataset;
    const turned = { ascending: "descending", descending: "ascending" }[head.getAttribute("aria-sort")];
    update({ sort: `${key}:${turned ?? (isColumn(key) && columns[place(key)].higher ? "descending" : "ascending")}` });
  });

  // The dialog that opens for a cell

  const openCell = (td) => update({ cell: `${entries[rows.indexOf(td.parentElement)].name}/${place(keys[td.cellIndex])}` });
  table.addEventListener("click", ({ target }) => target.closest("td[data-open]") && openCell(target.closest("td")));
  table.addEventListener("keydown", ({ key, target }) => key === "Enter" && target.matches("td[data-open]") && openCell(target));
  const dialog = $("#dialog");
  let opened = "";
  dialog.addEventListener("close", () => !dialog.open && state.cell && update({ cell: "" }));
  dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());

  function dialogs() {
    if (state.cell === opened) return;
    opened = state.cell;
    const [name, column] = state.cell.split("/");
    const entry = entries.find((candidate) => candidate.name === name);
    const content = entry?.cells[column] ? detail(entry, Number(column)) : null;
    if (content) {
      $(".sheet", dialog).replaceChildren(...content);
      if (!dialog.open) dialog.showModal();
      dialog.scrollTop = 0;
    } else if (dialog.open) dialog.close();
  }
  function top(title, under) {
    const close = make("button", { type: "button", "aria-label": "Close" }, "✕");
    close.addEventListener("click", () => dialog.close());
    return make("header", {}, make("div", {}, make("h2", { id: "dialog-title" }, title), make("p", { className: "quiet" }, under)), close);
  }
  function detail(entry, index) {
    const cell = entry.cells[index];
    return [
      top([isolated(entry.label), ", ", isolated(columns[index].name)], [isolated(entry.checkpoint)]),
      make("p", { className: "big" }, cell.mean),
      facts(cell.facts),
      ...(cell.sets.length ? [make("h3", {}, "Set by set"), plain(["Demonstrations", "Mean", "Each order and format"], cell.sets)] : []),
      ...documents(entry, index),
      make("h3", {}, "Runs"),
      plain(["File", "Date (UTC)", "Seed", "Order", "lm-eval, transformers, lm-eval-icl"], cell.runs.map((place) => runs[place])),
      make("p", { className: "quiet" }, "On a command line, this entry is called ", make("code", {}, entry.name), "."),
    ];
  }

  // The documents of a cell, or of two cells side by side

  function documents(entry, index) {
    const title = make("h3", {}, "Documents");
    const sidesOf = (row) => samples?.cells[`${row}/${index}`];
    const own = entries.indexOf(entry);
    if (!sidesOf(own)) {
      if (columns[index].kind !== "task") return [];
      const command = `lm-eval-icl samples ${entry.name} OTHER --task ${columns[index].name} --results RESULTS`;
      const why = "This page has no prompts of this cell, since published prompts contaminate. They are beside the files below "
        + "(--log_samples; files of collect have none), and this command shows them, with another row's: ";
      return [title, make("p", { className: "quiet" }, why, make("code", {}, command))];
    }
    const others = entries.map((_, row) => row).filter((row) => row !== own && sidesOf(row));
    const option = (value, text) => make("option", { value }, text);
    const other = make("select", { "aria-label": "Other row" }, option("", "no other row"),
      others.map((row) => option(row, `beside B: ${entries[row].label}`)));
    const filter = make("select", { "aria-label": "Documents" }, [["", "all documents"], ["differ", "A and B differ"],
      ["10", "A right, B wrong"], ["01", "A wrong, B right"], ["1", "A right"], ["0", "A wrong"]].map((pair) => option(...pair)));
    const list = make("div");
    const fill = () => {
      const sideRows = other.value ? [own, other.value] : [own];
      const sides = sideRows.map(sidesOf);
      const kinds = sideRows.map((row) => kind(entries[row]));
      const byId = sides.map(({ documents }) => new Map(documents.map((one) => [one.doc_id, one])));
      const pairs = [...byId[0].keys()].map((id) => byId.map((side) => side.get(id))).filter((pair) => pair.every(Boolean));
      const asked = pairs.filter((pair) => !filter.value
        || (filter.value === "differ" ? pair.length > 1 && pair[0].answer !== pair[1].answer
          : pair.length >= filter.value.length && pair.map((one) => Number(one.is_right)).join("").startsWith(filter.value)));
      list.replaceChildren(
        make("p", { className: "quiet" }, `${asked.length} of ${pairs.length} documents. A: ${sides[0].run}${sides[1] ? `; B: ${sides[1].run}` : ""}`),
        ...asked.map((pair) => sample(pair, kinds)));
    };
    other.addEventListener("change", fill);
    filter.addEventListener("change", fill);
    fill();
    return [title, make("p", {}, "A is this row. ", other, " ", filter), list];
  }
  const kind = ({ rule }) => (rule ? `value under the rule ${rule}` : "log-likelihood");
  function start(query) {
    const characters = [...query.replace(/\s+/g, " ").trim()];
    return characters.length > 60 ? `${characters.slice(0, 60).join("")}…` : characters.join("");
  }
  function sample(pair, kinds) {
    const verdict = ({ answer, is_right }) => make("span", { className: is_right ? "right" : "wrong" }, isolated(answer), is_right ? " ✓" : " ✗");
    const summary = make("summary", {}, `${pair[0].doc_id}: right answer `, isolated(pair[0].gold),
      pair.map((one, side) => [`; ${"AB"[side]}: `, verdict(one)]).flat(), make("span", { className: "query quiet" }, isolated(start(pair[0].query))));
    const details = make("details", {}, summary);
    details.addEventListener("toggle", () => {  // made when it is opened
      if (!details.open || details.childElementCount > 1) return;
      const values = pair[0].options.map((option, place) => [option, ...pair.map((one) => one.values[place]?.toFixed(3) ?? "")]);
      const same = pair.every((one) => one.demonstrations + one.query === pair[0].demonstrations + pair[0].query);
      details.append(
        plain(["Option", ...kinds.map((words, side) => (kinds.length > 1 ? `${"AB"[side]}: ${words}` : words))], values),
        make("div", { className: "sides" }, (same ? pair.slice(0, 1) : pair).map(({ demonstrations, query }, side) => make("div", {},
          make("p", { className: "quiet" }, same ? (pair.length > 1 ? "The prompt of both" : "The prompt") : `The prompt of ${"AB"[side]}`), make("pre", {}, query),
          demonstrations && make("details", {}, make("summary", { className: "quiet" }, "its demonstrations"), make("pre", {}, demonstrations))))));
    });
    return details;
  }

  // Downloads of the rows that are shown

  const FORMATS = {
    CSV() {
      const field = (value) => {  // a spreadsheet would take a text that begins like this for a formula
        const safe = typeof value === "string" && /^\s*[=+\-@]/.test(value) ? `'${value}` : String(value ?? "");
        return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
      };
      const names = ["name", "checkpoint", "details", "method", "arguments", "conditions", "rule"];
      const lines = shown().flatMap((row) => columns.map((column, at) => [entries[row], column, entries[row].cells[at]]))
        .filter(([, , cell]) => cell).map(([entry, column, cell]) => [...names.map((name) => entry[name]), column.name, cell.sort, cell.interval]);
      return ["csv", "text/csv", [[...names, "column", "mean", "interval"], ...lines].map((line) => line.map(field).join(",")).join("\n")];
    },
    Markdown() {
      const safe = (text) => text.replace(/[\\`*_{}[\]<>()#|~!&@]/g, "\\$&");
      const lines = shown().map((row) => [entries[row].checkpoint, entries[row].label, ...entries[row].cells.map((cell) => cell?.short ?? "–")]);
      const head = ["checkpoint", "method", ...columns.map(({ name }) => name)];
      return ["md", "text/markdown", [head, head.map((_, at) => (at < 2 ? "---" : "---:")), ...lines]
        .map((line, at) => `| ${line.map(at === 1 ? String : safe).join(" | ")} |`).join("\n")];
    },
  };
  for (const button of $$("[data-download]")) button.addEventListener("click", () => {
    const [ending, type, text] = FORMATS[button.dataset.download]();
    const address = URL.createObjectURL(new Blob([`${text}\n`], { type }));
    make("a", { href: address, download: `leaderboard.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });

  rows.forEach((tr, row) => keys.forEach((key, at) => {
    if (!isColumn(key) || !entries[row].cells[place(key)]) return;
    tr.cells[at].dataset.open = "";
    tr.cells[at].tabIndex = 0;
  }));
  for (const element of [form, $("#status"), ...$$(".scripted")]) element.hidden = false;
  render();
})();
