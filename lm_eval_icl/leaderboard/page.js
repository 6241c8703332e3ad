"use strict";
// Sorts, filters and opens the table that is already there. All state is in the address (#...), so that it can be sent to
// somebody. Names come from strangers: they are set as text, never as HTML.
(async () => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Data

  async function load() {
    const element = $("#data");
    let text = element.textContent;
    if (element.type !== "application/json") {
      const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
      text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    }
    return JSON.parse(text);
  }

  const data = await load();
  const named = (kind, values) =>
    values && Object.fromEntries(data.fields[kind].map((field, place) => [field, values[place]]));
  const { columns, entries } = data;
  for (const entry of entries) {
    entry.runs = entry.runs.map((run) => named("run", run));
    entry.cells = entry.cells.map((values) => {
      const cell = named("cell", values);
      if (cell) [cell.numbers, cell.difference] = [named("numbers", cell.numbers), named("difference", cell.difference)];
      return cell;
    });
  }
  const baselines = new Set(data.baselines);
  const pairs = new Map(data.pairs.map(([a, b, ...differences]) => [`${a} ${b}`, differences]));

  // The first entry less the second on a column; null where they are not paired, undefined where it is not in this page.
  function pair(first, second, column) {
    const [a, b] = [entries.indexOf(first), entries.indexOf(second)];
    const forward = pairs.get(`${a} ${b}`);
    const known = forward ?? pairs.get(`${b} ${a}`);
    if (!known) return null;
    const values = known.find(([place]) => place === column);
    if (!values) return undefined;
    const of = named("pair", values.slice(1));
    if (forward) return of;
    const less = (text) => text.replace(/^[+−]/, (sign) => (sign === "+" ? "−" : "+"));
    const verdict = { better: "worse", worse: "better", same: "same" }[of.verdict];
    return { ...of, mean: less(of.mean), low: less(of.high), high: less(of.low), verdict, better: of.worse, worse: of.better };
  }

  // HTML

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
    make("dl", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
  const plain = (head, rows, kind = "") =>
    make("div", { className: "scroll" }, make("table", { className: `plain ${kind}` },
      make("thead", {}, make("tr", {}, head.map((title) => make("th", { scope: "col" }, title)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((value, place) =>
        make("td", { className: place ? "number" : "" }, typeof value === "string" ? isolated(value) : value)))))));
  function command(text) {
    const button = make("button", { type: "button" }, "Copy");
    const code = make("code", {}, text);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {  // a browser may refuse it to a file
        getSelection().selectAllChildren(code);
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
      }
    });
    return [make("pre", {}, code), button];
  }

  // State, in the address

  const ONE = ["sort", "q", "checkpoint", "method", "conditions", "complete", "show", "more", "cell", "compare"];
  const MANY = ["hide", "row"];
  const blank = () => ({ ...Object.fromEntries(ONE.map((key) => [key, ""])), ...Object.fromEntries(MANY.map((key) => [key, []])) });
  let state = blank();

  function parse() {
    const found = blank();
    const given = new URLSearchParams(location.hash.slice(1));
    for (const key of ONE) found[key] = given.get(key) ?? "";
    for (const key of MANY) found[key] = given.getAll(key);
    return found;
  }
  function update(changes, replace = false) {
    state = { ...state, ...changes };
    const given = new URLSearchParams();
    for (const key of ONE) if (state[key]) given.set(key, state[key]);
    for (const key of MANY) for (const value of state[key]) given.append(key, value);
    try {
      history[replace ? "replaceState" : "pushState"](null, "", `#${given}`);
    } catch {}  // some frames have no address of their own: the page works, without links to its states
    render();
  }
  addEventListener("hashchange", () => {
    if (location.hash && !location.hash.includes("=")) return;  // a place in the page
    state = parse();
    render();
  });

  // The table

  const table = $("#board");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const keys = heads.map((head) => head.dataset.key);
  const place = (key) => Number(key.slice(1));  // of the column "c7"
  const isColumn = (key) => /^c\d+$/.test(key);
  const isWide = columns.length > 8;
  const originals = rows.map((row) => [...row.cells].map((td) => $("b, span", td)?.textContent));
  entries.forEach((entry, row) => entry.cells.forEach((cell, index) => {
    if (!cell) return;
    const td = rows[row].cells[keys.indexOf(`c${index}`)];
    const difference = $("em", td);
    cell.mean = $("b, span", td).textContent;
    cell.interval = $("i", td).textContent;
    if (cell.difference) [cell.less, cell.verdict] = [difference?.textContent.split(" ")[0] ?? "", difference?.className || "same"];
  }));
  const texts = entries.map((entry) =>
    [entry.checkpoint, entry.details, entry.label, entry.arguments].join(" ").toLowerCase());

  const shownScore = (cell) =>
    cell && (state.show === "corrected" ? cell.numbers.corrected ?? cell.numbers.mean : cell.numbers.mean);

  function sortValue(row, key) {
    const entry = entries[row];
    if (key === "entry") return `${entry.label} ${entry.checkpoint}`.toLowerCase();
    if (isColumn(key)) return shownScore(entry.cells[place(key)]) ?? null;
    return entry.extras[key];
  }
  function sorting() {
    const [, key, direction] = state.sort.match(/^(.*):(ascending|descending)$/) ?? [];
    return { key, direction };
  }
  function sorted() {
    const order = rows.map((_, row) => row);
    const { key, direction } = sorting();
    if (!keys.includes(key)) return order;
    const sign = direction === "descending" ? -1 : 1;
    const values = order.map((row) => sortValue(row, key));
    const isMissing = (value) => value === null || value === undefined;
    return order.sort((a, b) => {
      const [one, other] = [values[a], values[b]];
      if (isMissing(one) || isMissing(other)) return isMissing(one) - isMissing(other) || a - b;  // missing ones last
      return sign * (typeof one === "string" ? one.localeCompare(other) : one - other) || a - b;
    });
  }
  function isShownColumn(head) {
    const { section, key } = head.dataset;
    if (section === "more") return state.more === "1" || (state.more === "" && !isWide);
    return !isColumn(key) || !state.hide.includes(section);
  }
  function isShownRow(row, shown) {
    const entry = entries[row];
    return state.q.toLowerCase().split(/\s+/).every((word) => texts[row].includes(word))
      && ["checkpoint", "method", "conditions"].every((name) => !state[name] || state[name] === `=${entry[name]}`)
      && (!state.complete || shown.every((key) => !isColumn(key) || entry.cells[place(key)]));
  }

  // How much smaller the table is on paper, so that its columns fit; the same in page.py.
  const printed = (count) => Math.max(0.4, Math.min(1, 1000 / (230 + 100 * count))).toFixed(2);

  let view = { rows: [], keys: [] };
  function render() {
    const shown = heads.map(isShownColumn);
    const shownKeys = keys.filter((_, index) => shown[index]);
    const order = sorted();
    const kept = order.filter((row) => isShownRow(row, shownKeys));
    view = { rows: kept, keys: shownKeys };
    // A row that is moved loses the focus, so none is moved without need.
    if (order.some((row, at) => body.rows[at] !== rows[row])) body.append(...order.map((row) => rows[row]));
    const { key, direction } = sorting();
    heads.forEach((head, index) => {
      head.hidden = !shown[index];
      head.setAttribute("aria-sort", head.dataset.key === key ? direction : "none");
    });
    table.style.setProperty("--print", printed(shownKeys.length - 1));
    rows.forEach((row, index) => {
      row.hidden = !kept.includes(index);
      const isTicked = state.row.includes(entries[index].name);
      row.classList.toggle("ticked", isTicked);
      $("input", row).checked = isTicked;
      [...row.cells].forEach((td, column) => {
        td.hidden = !shown[column];
        const cell = isColumn(keys[column]) && entries[index].cells[place(keys[column])];
        if (!cell?.corrected) return;
        const isCorrected = state.show === "corrected";
        $("b, span", td).textContent = isCorrected ? cell.corrected : originals[index][column];
        td.classList.toggle("corrected", isCorrected);
      });
    });
    const hidden = rows.length - kept.length;
    $("#status span").textContent = `${kept.length} of ${rows.length} ${rows.length === 1 ? "entry" : "entries"} shown, ${hidden} hidden`
      + (state.show === "corrected" ? ". Corrected for chance: 0 is chance, 100 is all. Columns without options are as measured." : "");
    $("#all").hidden = !hidden;
    controls();
    selection();
    dialogs();
    if (!$("td[tabindex='0']", body)?.checkVisibility()) rove($$("td[data-open]", body).find((td) => td.checkVisibility()));
  }

  // Controls

  const form = $("#controls");
  function controls() {
    for (const control of form.elements) {
      if (control.name === "section") control.checked = !state.hide.includes(control.value);
      else if (control.name === "more") control.checked = state.more === "1" || (state.more === "" && !isWide);
      else if (control.name === "complete") control.checked = Boolean(state.complete);
      else if (control.name && control.value !== state[control.name]) control.value = state[control.name];
    }
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target.name === "section")
      update({ hide: $$("[name=section]", form).filter((box) => !box.checked).map((box) => box.value) });
    else if (target.name === "more") update({ more: target.checked ? "1" : "0" });
    else if (target.name === "complete") update({ complete: target.checked ? "1" : "" });
    else update({ [target.name]: target.value }, target.type === "search");
  });
  $("#all").addEventListener("click", () => update({ q: "", checkpoint: "", method: "", conditions: "", complete: "" }));
  addEventListener("click", ({ target }) => {
    for (const menu of $$(".menu[open]")) if (!menu.contains(target)) menu.open = false;
  });
  addEventListener("keydown", ({ key }) => {
    if (key === "Escape") for (const menu of $$(".menu[open]")) (menu.open = false), $("summary", menu).focus();
  });
  table.tHead.addEventListener("click", ({ target }) => {
    const head = target.closest("button")?.closest("th");
    if (!head) return;
    const { key } = head.dataset;
    const isFallingFirst = isColumn(key) && columns[place(key)].higher_is_better;
    const turned = { ascending: "descending", descending: "ascending" }[head.getAttribute("aria-sort")];
    update({ sort: `${key}:${turned ?? (isFallingFirst ? "descending" : "ascending")}` });
  });

  const THEMES = ["system", "light", "dark"];
  function theme(name) {
    $("#theme").textContent = `◐ ${name}`;
    $("#theme").setAttribute("aria-label", `Colors: ${name}`);
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }
  function remembered() {
    try {
      const name = localStorage.getItem("leaderboard-theme");
      return THEMES.includes(name) ? name : "system";
    } catch {  // a browser may refuse storage to a file
      return "system";
    }
  }
  $("#theme").addEventListener("click", () => {
    const name = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
    theme(name);
    try {
      localStorage.setItem("leaderboard-theme", name);
    } catch {}
  });

  // Cells: arrow keys move, Enter opens

  let current = null;
  function rove(td) {
    if (!td) return;
    current?.setAttribute("tabindex", "-1");
    current = td;
    td.setAttribute("tabindex", "0");
  }
  const open = (td) => update({ cell: `${entries[rows.indexOf(td.parentElement)].name}/${columns[place(keys[td.cellIndex])].name}` });
  body.addEventListener("click", ({ target }) => {
    const td = target.closest("td[data-open]");
    if (!td) return;
    rove(td);
    td.focus();
    open(td);
  });
  body.addEventListener("focusin", ({ target }) => target.matches("td[data-open]") && rove(target));
  body.addEventListener("keydown", (event) => {
    const td = event.target.closest("td[data-open]");
    if (!td) return;
    const across = (step, from = td) => {
      let next = from;
      do next = step === "next" ? next.nextElementSibling : next.previousElementSibling;
      while (next && (!next.matches("td[data-open]") || next.hidden));
      return next;
    };
    const down = (step) => {
      let row = td.parentElement;
      do row = step === "next" ? row.nextElementSibling : row.previousElementSibling;
      while (row && (row.hidden || !row.cells[td.cellIndex].matches("td[data-open]")));
      return row?.cells[td.cellIndex];
    };
    const all = () => $$("td[data-open]", td.parentElement).filter((each) => !each.hidden);
    const moves = {
      ArrowRight: () => across("next"), ArrowLeft: () => across("previous"), ArrowDown: () => down("next"),
      ArrowUp: () => down("previous"), Home: () => all()[0], End: () => all().at(-1),
    };
    if (event.key === "Enter" || event.key === " ") open(td);
    else if (moves[event.key]) moves[event.key]()?.focus();
    else return;
    event.preventDefault();
  });

  // Ticked rows

  body.addEventListener("change", ({ target }) => {
    const { name } = entries[rows.indexOf(target.closest("tr"))];
    update({ row: target.checked ? [...state.row, name] : state.row.filter((each) => each !== name) }, true);
  });
  const ticked = () => state.row.map((name) => entries.find((entry) => entry.name === name)).filter(Boolean);
  function selection() {
    const chosen = ticked().length;
    $("#bar").hidden = !chosen;
    $("#bar span").textContent = chosen === 1 ? "1 row ticked. Tick another to compare." : `${chosen} rows ticked`;
    $("#compare").disabled = chosen < 2;
  }
  $("#compare").addEventListener("click", () => update({ compare: "1" }));
  $("#clear").addEventListener("click", () => update({ row: [], compare: "" }));

  // What a cell opens to, and the comparison

  const dialog = $("#dialog");
  const sheet = $(".sheet", dialog);
  let opened = "";
  dialog.addEventListener("close", () => {
    // The event comes later than the closing: meanwhile "forward" may have opened the dialog again.
    if (!dialog.open && (state.cell || state.compare)) update({ cell: "", compare: "" });
  });
  dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());

  function dialogs() {
    const wanted = JSON.stringify([state.cell, state.compare && state.row]);
    if (wanted === opened) return;
    opened = wanted;
    const cut = state.cell.indexOf("/");
    const entry = entries.find(({ name }) => name === state.cell.slice(0, cut));
    const column = columns.findIndex(({ name }) => name === state.cell.slice(cut + 1));
    const chosen = ticked();
    let content = null;
    if (entry?.cells[column]) content = detail(entry, column);
    else if (state.compare && chosen.length > 1) content = comparison(chosen);
    if (content) {
      sheet.replaceChildren(...content);
      dialog.classList.toggle("broad", !state.cell);
      if (!dialog.open) dialog.showModal();
      dialog.scrollTop = 0;
    } else if (dialog.open) dialog.close();
  }
  function top(title, under) {
    const close = make("button", { type: "button", "aria-label": "Close" }, "✕");
    close.addEventListener("click", () => dialog.close());
    return make("header", {}, make("div", {}, make("h2", { id: "dialog-title" }, title), make("p", { className: "quiet" }, under)), close);
  }
  const name = (entry) => isolated([entry.label, entry.checkpoint, entry.details].filter(Boolean).join(", "));

  const WORDS = { better: "▲ better", worse: "▼ worse", same: "○ not significant" };
  const verdict = (how) => make("em", { className: how }, WORDS[how]);
  const known = (words, key) => (Object.hasOwn(words, key) ? words[key] : key);
  const errors = ({ errors: [all, documents, sets] }) =>
    all === undefined ? "unknown" : documents === undefined ? all : `${all} (documents alone ${documents}, demonstrations alone ${sets})`;
  const freedom = ({ df }) => (df === "–" ? "unlimited" : df);

  // The sets of demonstrations as dots beside the mean and its interval.
  function strip({ sets, mean, interval }) {
    const number = (text) => Number(text.replace("−", "-").replaceAll(",", ""));  // not a number where there is a dash
    const [from, to] = interval.split(/–| to /);
    const dots = sets.map(([, text]) => text);
    const texts = [from, mean, to, ...dots].filter((text) => Number.isFinite(number(text))).sort((one, other) => number(one) - number(other));
    const [low, high] = [texts.at(0), texts.at(-1)];
    if (!(number(high ?? "") > number(low ?? "")) || !texts.includes(mean)) return null;
    const at = (text) => `${(100 * (number(text) - number(low))) / (number(high) - number(low))}%`;
    const mark = (className, text, label = "") => {
      const element = make("span", { className }, label);
      element.style.left = at(text);
      return element;
    };
    const line = mark("interval", texts.includes(from) ? from : mean);
    line.style.right = `calc(100% - ${at(texts.includes(to) ? to : mean)})`;
    return make("div", { className: "strip", "aria-hidden": "true" }, line, mark("mean", mean),
      dots.filter((text) => texts.includes(text)).map((text) => mark("dot", text)), mark("end", low, low), mark("end last", high, high));
  }

  function detail(entry, index) {
    const column = columns[index];
    const cell = entry.cells[index];
    const { numbers, difference } = cell;
    const isTask = column.kind === "task";
    const base = entries.find(({ name }) => name === data.baseline[entry.name]);
    const content = [
      top([isolated(entry.label), ", ", isolated(column.name)], [isolated([entry.checkpoint, entry.details].filter(Boolean).join(", "))]),
      make("p", { className: "big" }, `${cell.mean}${column.unit} `, make("small", {}, `95% interval ${cell.interval}, ${column.metric}`)),
      make("p", { className: "quiet" }, cell.count),
      isTask ? strip(cell) : null,
      facts([
        ["Expected", cell.expected && `${cell.expected}${column.unit}: the paper's value`],
        ["Chosen on dev", cell.chosen],
        ["Standard error", errors(cell)],
        ["Degrees of freedom", freedom(cell)],
        ["Interval", known(data.how, cell.how)],
        ["Rank", numbers.rank_first && `${[...new Set([numbers.rank_first, numbers.rank_last])].join("–")}${entry.transductive ? " of the transductive entries" : ""}${cell.tied ? ", not significantly below the best" : ""}`],
        ["Corrected for chance", cell.corrected],
        ["Answers given", cell.predicted],
        ["Always one answer", cell.majority && `${cell.majority}${column.unit}: the score of always giving the most frequent right answer`],
        ["Order sensitivity", cell.sensitivity && `${cell.sensitivity} of answers differ between two orders`],
        ["Demonstrations left out", cell.left_out ? `${cell.left_out}, because prompts were too long` : "none"],
        ...cell.marks.map((mark) => ["Mark", Object.hasOwn(data.marks, mark) ? `${mark}: ${data.marks[mark]}` : isolated(mark)]),
      ]),
      make("h3", {}, entry.against_itself ? "Difference to the same runs without the rule" : "Difference to the baseline"),
    ];
    if (difference) {
      const { better, worse, sets, p_signs, detectable } = difference;
      content.push(
        make("p", {}, make("strong", {}, `${cell.less}${column.points}`), ` (${difference.interval}) `, verdict(cell.verdict)),
        facts([
          // A cell that is compared with another row than the entry's other cells says so in a mark.
          ["Baseline", base && !cell.marks.some((mark) => mark.startsWith("Compared with")) ? isolated(base.label) : null],
          ["p", `${difference.p}, after Holm over the column ${difference.p_holm}`],
          ["Detectable difference", detectable && `${detectable}${column.points}: the smallest that would be found four times in five`],
          ["By set", numbers.sets > 1 ? `higher with ${better}, lower with ${worse} of ${sets} ${sets === 1 ? "set" : "sets"}${p_signs && `; p of sign flips ${p_signs}`}` : null],
          ["Standard error", errors(difference)],
          ["Degrees of freedom", freedom(difference)],
          ["p and interval", known(data.how, difference.how)],
        ]));
    } else content.push(make("p", { className: "quiet" }, baselines.has(entry.name) ? "This is the baseline." : "None: the prompts are not the same, or there are no answers document by document."));
    const numbered = (places) => places.map((run) => `${run + 1}`).join(", ");
    if (isTask && cell.sets.length) {
      const hasOrders = cell.sets.some(([, , orders]) => orders);
      const isRepeated = cell.sets.some(([, , , runs]) => runs.some(({ length }) => length > 1));
      content.push(make("h3", {}, "Set by set"),
        plain(["Demonstrations", "Mean", ...(hasOrders ? ["Orders"] : []), "Run", ...(isRepeated ? ["Repeated by"] : [])],
          cell.sets.map(([label, mean, orders, runs]) => [
            label, mean, ...(hasOrders ? [orders] : []), numbered(runs.flatMap((of) => of.slice(0, 1))),
            ...(isRepeated ? [numbered(runs.flatMap((of) => of.slice(1))) || "–"] : []),
          ])));
    }
    if (!isTask) {
      const tasks = columns.map((each, at) => [each, entry.cells[at]]).filter(([each]) => each.kind === "task" && Object.hasOwn(column.weights, each.name));
      content.push(make("h3", {}, "Task by task"),
        plain(["Task", "Mean", "95% interval", "Weight"], tasks.map(([each, of]) => [each.name, of?.mean ?? "–", of?.interval ?? "–", column.weights[each.name]])));
    }
    const uses = new Set(isTask ? cell.sets.flatMap(([, , , runs]) => runs.flat()) : []);
    const runs = entry.runs.map((run, at) => [run, at]).filter(([, at]) => !uses.size || uses.has(at));
    const given = (key, title) => {
      const versions = [...new Set(runs.map(([run]) => run[key]).filter(Boolean))];
      return versions.length ? `${title} ${versions.join(", ")}` : null;
    };
    content.push(
      make("h3", {}, "Runs"),
      make("p", { className: "quiet" }, isolated([given("lm_eval", "lm-eval"), given("transformers", "transformers"), given("lm_eval_icl", "lm-eval-icl")].filter(Boolean).join(", "))),
      plain(["File", "Run", "Seed", "Order", "Date (UTC)"], runs.map(([run, at]) => [run.file, `${at + 1}`, run.seed || "–", run.order, run.date]), "runs"),
      make("h3", {}, "Command"), ...command(entry.command));
    return content.filter(Boolean);
  }

  function comparison([first, ...others]) {
    const content = [top("Comparison", "Each difference is the first row less the other, on the same prompts. p is of one comparison: it is not adjusted for others.")];
    for (const other of others) {
      let isComplete = true;
      let isPaired = false;
      const lines = columns.map((column, index) => {
        const [one, two] = [first.cells[index], other.cells[index]];
        if (!one || !two) return null;
        const of = pair(first, other, index);
        const start = [column.name, one.mean, two.mean];
        if (!of) {
          isComplete &&= of === null;
          return [...start, of === null ? "not paired" : "not in this page", "", "", "", ""];
        }
        isPaired = true;
        return [...start, of.mean, `${of.low} to ${of.high}`, make("span", {}, `${of.p} `, verdict(of.verdict)),
          of.detectable, column.kind !== "task" ? "" : of.sets > 1 ? `${of.better} of ${of.sets}` : "one set: over documents only"];
      }).filter(Boolean);
      content.push(
        make("h3", {}, isolated(first.label), " less ", isolated(other.label)),
        make("div", { className: "two" }, facts([["First", name(first)], ["Other", name(other)]])),
        plain(["Column", "First", "Other", "Difference", "95% interval", "p", "Detectable", "Higher in sets"], lines),
        make("p", { className: "quiet" }, isPaired ? "Detectable: the smallest difference that the comparison would find four times in five." : "No column has the same prompts for both."));
      if (!isComplete) content.push(make("p", { className: "quiet" }, "The rest, in a terminal:"));
      content.push(...command(`lm-eval-icl compare ${first.name} ${other.name} --results ${data.results}`));
    }
    return content;
  }

  // Downloads, of the rows and columns shown

  const results = () => view.rows.flatMap((row) => view.keys.filter(isColumn).map((key) => [entries[row], columns[place(key)], entries[row].cells[place(key)]]));
  const TEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}",
    "±": "$\\pm$", "†": "$^\\dagger$", "−": "$-$", "–": "--" };
  const NOTE = `mean ± half of the 95% interval; † differs from the baseline, p ≤ ${data.level} after Holm over the column`;
  const short = (cell) => (cell ? cell.mean + (cell.half.replace("†", "") ? " ± " : "") + cell.half : "–");
  // The table as rows of texts: the entry, its checkpoint, and the columns shown.
  function shownTable(safe) {
    const shown = view.keys.filter(isColumn).map(place);
    const lines = view.rows.map((row) => [entries[row].label, [entries[row].checkpoint, entries[row].details].filter(Boolean).join(", "),
      ...shown.map((index) => short(entries[row].cells[index]))]);
    return [["entry", "checkpoint", ...shown.map((index) => columns[index].name)], ...lines].map((line) => line.map(safe));
  }
  const FORMATS = {
    CSV() {
      const names = ["name", "checkpoint", "details", "method", "arguments", "conditions"];
      const head = ["entry", ...names.slice(1), "column", "kind", "metric", ...data.fields.numbers, "marks"];
      // A text that begins like a formula would be one in a spreadsheet.
      const field = (value) => {
        if (value === null || value === undefined) return "";
        if (typeof value !== "string") return String(value);
        const safe = /^\s*[=+\-@]/.test(value) ? `'${value}` : value;
        return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
      };
      const lines = results().filter(([, , cell]) => cell).map(([entry, column, { numbers, marks }]) =>
        [...names.map((name) => entry[name]), column.name, column.kind, column.metric, ...Object.values(numbers), marks.join("; ")]);
      return ["csv", "text/csv", [head, ...lines].map((line) => line.map(field).join(",")).join("\n")];
    },
    Markdown() {
      const [head, ...lines] = shownTable((text) => text.replace(/[\\`*_{}[\]<>()#|~!&@]/g, "\\$&"));
      const table = [head, head.map((_, at) => (at < 2 ? "---" : "---:")), ...lines].map((line) => `| ${line.join(" | ")} |`).join("\n");
      return ["md", "text/markdown", `${table}\n\n${NOTE}`];
    },
    LaTeX() {
      const safe = (text) => text.replace(/[\\~^<>±†−–]|[&%$#_{}]/g, (sign) => TEX[sign] ?? `\\${sign}`);
      const [head, ...lines] = shownTable(safe).map((line) => `${line.join(" & ")} \\\\`);
      return ["tex", "text/x-tex", ["% \\usepackage{booktabs}", `% ${safe(NOTE)}`, `\\begin{tabular}{ll${"r".repeat(view.keys.filter(isColumn).length)}}`,
        "\\toprule", head, "\\midrule", ...lines, "\\bottomrule", "\\end{tabular}"].join("\n")];
    },
    JSON() {
      const shown = view.keys.filter(isColumn).map(place);
      const rows = view.rows.map((row) => ({ ...entries[row], cells: Object.fromEntries(shown.map((at) => [columns[at].name, entries[row].cells[at]])) }));
      return ["json", "application/json", JSON.stringify({ columns: shown.map((at) => columns[at]), baseline: data.baseline, entries: rows }, null, 1)];
    },
  };
  for (const button of $$("[data-download]")) button.addEventListener("click", () => {
    const [ending, type, text] = FORMATS[button.dataset.download]();
    const address = URL.createObjectURL(new Blob([`${text}\n`], { type }));
    make("a", { href: address, download: `leaderboard.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });

  // Start

  columns.forEach((column, index) => {
    const at = keys.indexOf(`c${index}`);
    const ends = entries.flatMap((entry) => [entry.cells[index]?.numbers.low, entry.cells[index]?.numbers.high]).filter(Number.isFinite);
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    rows.forEach((row, which) => {
      const numbers = entries[which].cells[index]?.numbers;
      if (!numbers) return;
      const td = row.cells[at];
      td.dataset.open = "";
      td.tabIndex = -1;
      if ([numbers.low, numbers.mean, numbers.high].includes(null) || !(high > low)) return;
      for (const end of ["low", "mean", "high"])  // on one scale for the column
        $("i", td).style.setProperty(`--${end}`, `${(100 * (numbers[end] - low)) / (high - low)}%`);
    });
  });
  table.setAttribute("role", "grid");
  for (const element of [form, $("#status"), $("#theme"), ...$$(".scripted, tbody th input")]) element.hidden = false;
  theme(remembered());
  state = parse();
  render();
})();
