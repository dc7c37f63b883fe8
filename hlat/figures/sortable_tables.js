// Tables that the reader can sort, filter and save; without this script they are plain tables.
"use strict";
(() => {
  const MIN_FILTERED = 8;
  const UNITS = { T: 1e12, B: 1e9, M: 1e6, k: 1e3, h: 3600, min: 60, s: 1, ms: 1e-3 };

  // Return the number at the start of a cell, such as 1,234, 12.5 %, 1.5M or 2 h 5 min; NaN for a text
  function parse(text) {
    const parts = [...text.replaceAll(",", "").matchAll(/([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(min|ms|[hskMBT])?(?![a-z])/gi)];
    if (!parts.length || parts[0].index > 1) return NaN;
    const value = ([, number, unit]) => Number(number) * (UNITS[unit] ?? 1);
    const times = parts.filter(([, , unit]) => ["h", "min", "s", "ms"].includes(unit));
    return times.length > 1 ? times.reduce((sum, part) => sum + value(part), 0) : value(parts[0]);
  }

  function isNumeric(rows, column) {
    const texts = rows.map((row) => row.cells[column].textContent.trim()).filter((text) => text && text !== "n/a");
    return texts.length > 0 && texts.every((text) => !/^\d{4}-\d\d/.test(text) && !Number.isNaN(parse(text)));
  }

  function makeSortable(table, body, original) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const sort = pageTools.button(head.textContent, () => {
        const isUp = head.getAttribute("aria-sort") === "ascending";
        const isDown = head.getAttribute("aria-sort") === "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        if (isDown) { body.append(...original); return; }
        head.setAttribute("aria-sort", isUp ? "descending" : "ascending");
        const numeric = isNumeric(original, column);
        const key = (row) => {
          const text = row.cells[column].textContent.trim();
          return numeric ? parse(text) : text.toLowerCase();
        };
        const isMissing = (value) => value === "n/a" || value === "" || Number.isNaN(value);
        const compare = (a, b) => (numeric ? a - b : a.localeCompare(b, "en", { numeric: true })) * (isUp ? -1 : 1);
        // Missing values are last in both directions
        const rows = original.map((row) => [key(row), row]).sort(([a], [b]) =>
          isMissing(a) || isMissing(b) ? isMissing(a) - isMissing(b) : compare(a, b));
        body.append(...rows.map(([, row]) => row));
      }, head);
      sort.className = "sort";
      head.replaceChildren(sort);
    });
  }

  function addFilter(bar, name, rows) {
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", `Filter rows of: ${name}`);
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    });
    bar.append(input, count);
  }

  for (const table of document.querySelectorAll("table.data")) {
    const [body] = table.tBodies;
    const rows = [...body.rows];
    if (rows.length < 2) continue;
    const name = table.caption.textContent;
    const bar = document.createElement("div");
    bar.className = "table-tools";
    const title = document.createElement("span");
    title.textContent = name;
    title.setAttribute("aria-hidden", "true");  // the caption remains for screen readers
    bar.append(title);
    table.classList.add("live");
    if (rows.length >= MIN_FILTERED) addFilter(bar, name, rows);
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
    pageTools.button("CSV", () => {
      const shown = [...body.rows].filter((row) => !row.hidden);
      pageTools.downloadCsv(pageTools.fileName(name.split(/[:;,]/)[0]), [heads, ...shown.map((row) => [...row.cells].map((cell) => cell.textContent))]);
    }, bar, `Save the rows as CSV: ${name}`);
    makeSortable(table, body, rows);
    table.closest(".wide").before(bar);
  }
})();
