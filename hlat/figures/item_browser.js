// Items of benchmark tasks: select a task, show wrong or changed items, search, and open an item.
"use strict";
(() => {
  const section = document.getElementById("items");
  const PAGE_SIZE = 50;
  const PROMPT_END = 160;
  const find = (id) => document.getElementById(id);
  const taskSelect = find("item-task"), filterSelect = find("item-filter"), metricSelect = find("item-metric");
  const showSelect = find("item-show"), search = find("item-search"), status = find("item-status");
  const table = find("item-table"), pager = status.parentElement;
  const loaded = new Map();
  let task = null, shown = [], page = 0;

  async function read(name) {
    const element = document.querySelector(`script[data-items="${name}"]`);
    const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  function element(name, text, parent, className = "") {
    const created = document.createElement(name);
    created.textContent = text;
    if (className) created.className = className;
    parent.append(created);
    return created;
  }

  function fill(select, options) {
    const previous = select.value;
    select.replaceChildren();
    for (const [value, label] of options) element("option", label, select).value = value;
    if (options.some(([value]) => String(value) === previous)) select.value = previous;
    select.parentElement.hidden = options.length < 2;
  }

  const value = (answer) => answer?.values[metricSelect.value];
  const isRight = (answer) => value(answer) >= 1;
  const isWrong = (answer) => value(answer) < 1;
  const clip = (text, length = 80) => (text.length > length ? `${text.slice(0, length)}…` : text);

  // Return the last paragraph of a prompt, without the examples before it
  function excerpt(text) {
    const line = (text.trimEnd().split("\n\n").pop() ?? "").replace(/\s+/g, " ");
    return line.length > PROMPT_END ? `…${line.slice(-PROMPT_END)}` : line;
  }

  function targetText(item) {
    return item.gold.length ? item.gold.map((i) => item.choices[i].trim()).join(" | ") : item.target;
  }

  function answerText(item, answer) {
    if (!answer) return "n/a";
    if (answer.text !== undefined) return answer.answer;
    const best = answer.best[metricSelect.value];
    if (best !== undefined) return item.choices[best].trim();
    return answer.lls.map((ll) => ll.toFixed(2)).join(", ");
  }

  function mark(answer) {
    if (value(answer) === undefined) return "";
    return isRight(answer) ? "✓" : value(answer) > 0 ? value(answer).toFixed(2) : "✗";
  }

  // Conditions of the list "Show", by value
  function conditions(models) {
    const list = [["all", "all items", () => true]];
    models.forEach((name, i) => {
      list.push([`wrong-${i}`, `wrong: ${name}`, (item) => isWrong(item.models[i])]);
      list.push([`right-${i}`, `right: ${name}`, (item) => isRight(item.models[i])]);
    });
    for (let i = 1; i < models.length; i++) {
      const first = (item) => item.models[0], other = (item) => item.models[i];
      list.push([`changed-${i}`, `other answer: ${models[0]} and ${models[i]}`,
        (item) => first(item) && other(item) && answerText(item, first(item)) !== answerText(item, other(item))]);
      list.push([`lost-${i}`, `right: ${models[0]}, wrong: ${models[i]}`, (item) => isRight(first(item)) && isWrong(other(item))]);
      list.push([`gained-${i}`, `wrong: ${models[0]}, right: ${models[i]}`, (item) => isWrong(first(item)) && isRight(other(item))]);
    }
    return list;
  }

  function searchable(item) {
    item.searched ??= [item.prompt, item.target, ...item.choices, ...item.models.flatMap((a) => (a ? [a.text ?? "", a.answer ?? ""] : []))]
      .join("\n").toLowerCase();
    return item.searched;
  }

  function addDetails(item, row, models) {
    const details = document.createElement("tr");
    row.after(details);
    const cell = element("td", "", details, "item-details");
    cell.colSpan = row.cells.length;
    const prompts = new Map();
    item.models.forEach((answer, i) => {
      const prompt = answer?.prompt ?? item.prompt;
      if (answer && prompt) prompts.set(prompt, [...(prompts.get(prompt) ?? []), models[i]]);
    });
    for (const [prompt, names] of prompts) {
      element("h3", prompts.size > 1 ? `Prompt of ${names.join(", ")}` : "Prompt", cell);
      element("pre", prompt, cell);
    }
    if (item.choices.length) addChoices(item, cell, models);
    else {
      element("h3", "Target", cell);
      element("pre", item.target, cell);
    }
    item.models.forEach((answer, i) => {
      if (!answer) return;
      if (answer.text !== undefined) {
        element("h3", `Text of ${models[i]}`, cell);
        element("pre", answer.text, cell);
        if (answer.answer !== answer.text) element("p", `After the filter: ${answer.answer}`, cell);
      }
      const values = Object.entries(answer.values).map(([name, number]) => `${name} ${number}`);
      if (values.length) element("p", `${models[i]}: ${values.join(", ")}`, cell);
    });
  }

  function addChoices(item, cell, models) {
    const choices = document.createElement("table");
    const head = choices.createTHead().insertRow();
    element("th", item.choices.length > 1 ? "Choice" : "Text", head);
    models.forEach((name) => element("th", `log-likelihood, ${name}`, head, "number"));
    const body = choices.createTBody();
    item.choices.forEach((choice, i) => {
      const row = body.insertRow();
      element("td", `${choice}${item.gold.includes(i) ? " (target)" : ""}`, row, item.gold.includes(i) ? "text right" : "text");
      for (const answer of item.models) {
        const isBest = answer?.best[metricSelect.value] === i;
        element("td", answer ? `${isBest ? "▸ " : ""}${answer.lls[i]?.toFixed(4) ?? "n/a"}` : "n/a", row, "number");
      }
    });
    cell.append(choices);
    if (item.choices.length > 1) element("p", "▸ answer of the model with this metric", cell);
  }

  function addRow(item, body, models) {
    const row = body.insertRow();
    const first = element("th", "", row);
    first.scope = "row";
    const open = pageTools.button(`${item.id}`, () => {
      const isOpen = open.getAttribute("aria-expanded") === "true";
      open.setAttribute("aria-expanded", String(!isOpen));
      if (isOpen) row.nextElementSibling.remove();
      else addDetails(item, row, models);
    }, first, `Item ${item.id}: prompt and answers`);
    open.setAttribute("aria-expanded", "false");
    element("td", excerpt(item.prompt || item.choices[0] || ""), row, "prompt");
    element("td", clip(targetText(item)), row, "answer");
    for (const answer of item.models) {
      const cell = element("td", "", row, "answer");
      const sign = mark(answer);
      if (sign) element("span", `${sign} `, cell, isRight(answer) ? "right" : "wrong");
      cell.append(clip(answerText(item, answer)));
    }
  }

  function draw(models) {
    const start = page * PAGE_SIZE, part = shown.slice(start, start + PAGE_SIZE);
    const body = table.tBodies[0];
    body.replaceChildren();
    for (const item of part) addRow(item, body, models);
    const total = task.items.filter((item) => item.filter === filterSelect.value).length;
    const range = part.length ? `, ${(start + 1).toLocaleString("en")} to ${(start + part.length).toLocaleString("en")} shown` : "";
    status.textContent = `${shown.length.toLocaleString("en")} of ${total.toLocaleString("en")} items${range}`;
    previous.disabled = page === 0;
    next.disabled = start + PAGE_SIZE >= shown.length;
    table.parentElement.scrollTop = 0;
  }

  function select(models) {
    const accept = conditions(models).find(([name]) => name === showSelect.value)?.[2] ?? (() => true);
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = task.items.filter((item) => item.filter === filterSelect.value && accept(item)
      && words.every((word) => searchable(item).includes(word)));
    page = 0;
    draw(models);
  }

  async function load(models) {
    const index = taskSelect.value;
    if (!loaded.has(index)) loaded.set(index, await read(`task ${index}`));
    if (index !== taskSelect.value) return;
    task = loaded.get(index);
    fill(filterSelect, [...new Set(task.items.map((item) => item.filter))].map((name) => [name, name]));
    fill(metricSelect, task.metrics.map((name) => [name, name]));
    select(models);
  }

  let move = () => {};
  const previous = pageTools.button("Previous", () => move(-1), pager);
  const next = pageTools.button("Next", () => move(1), pager);

  async function start() {
    const { models, tasks } = await read("models");
    fill(taskSelect, tasks.map((name, i) => [i, name]));
    fill(showSelect, conditions(models));
    const head = table.tHead.rows[0];
    for (const text of ["Item", "Prompt", "Target", ...models]) element("th", text, head).scope = "col";
    taskSelect.addEventListener("change", () => load(models));
    for (const control of [filterSelect, metricSelect, showSelect]) control.addEventListener("change", () => select(models));
    search.addEventListener("input", () => select(models));
    move = (step) => { page += step; draw(models); };
    pageTools.button("CSV", () => pageTools.downloadCsv(pageTools.fileName(`items ${task.name}`), [
      ["item", "filter", "prompt", "target", ...models.flatMap((name) => [`answer ${name}`, `${metricSelect.value} ${name}`])],
      ...shown.map((item) => [item.id, item.filter, item.prompt, targetText(item),
        ...item.models.flatMap((answer) => [answerText(item, answer), value(answer) ?? ""])]),
    ]), pager, "Save the selected items as CSV");
    for (const row of document.querySelectorAll("table.data tbody tr")) {
      const name = row.cells[0].textContent;
      row.cells[0].replaceChildren();
      pageTools.button(name, () => {
        taskSelect.value = String(tasks.indexOf(name));
        load(models);
        section.scrollIntoView();
      }, row.cells[0], `Items of ${name}`).className = "task";
    }
    section.hidden = false;
    await load(models);
  }

  start();
})();
