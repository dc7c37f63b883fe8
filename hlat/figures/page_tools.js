// Elements, files and numbers that the other scripts of a page share.
"use strict";
const pageTools = (() => {
  function button(text, act, parent, label = "") {
    const element = document.createElement("button");
    element.type = "button";
    element.textContent = text;
    if (label) { element.title = label; element.setAttribute("aria-label", label); }
    element.addEventListener("click", act);
    parent.append(element);
    return element;
  }

  function download(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  // A field that begins as a formula gets an apostrophe, as spreadsheets would evaluate it
  function csvField(value) {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  const downloadCsv = (name, rows) =>
    download(`${name}.csv`, "text/csv", rows.map((row) => `${row.map(csvField).join(",")}\r\n`).join(""));

  const fileName = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "table";

  return { button, download, downloadCsv, fileName };
})();
