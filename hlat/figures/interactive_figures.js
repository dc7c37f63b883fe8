// Interactive figures: read-out, zoom, pan, scales and selection of curves. The data are part of the
// page; without this script the page shows the same figures as static SVG.
"use strict";
(() => {
  const NAMES = {
    tokens: "tokens", steps: "steps", hours: "hours since the run began", flops: "FLOPs of training",
  };
  const LEFT = 62, RIGHT = 12, TOP = 12, BOTTOM = 40, HEIGHT = 270;
  const DASHES = { solid: "", dashed: "6 3", dashdot: "8 3 2 3", dotted: "2 3" };
  const MIN_DRAG = 6, MIN_RANGE = 1e-4, FEW_POINTS = 40;
  // As in robust_range.py
  const MIN_VALUES = 20, QUANTILE = 0.05, REACH = 1.5, MIN_GAIN = 1.5;
  const MARK_SPACING = 7;
  const KEY = `hlat ${location.pathname} ${document.title}`;
  const svgNamespace = document.querySelector("figure svg")?.namespaceURI;
  if (!svgNamespace) return;
  const { button } = pageTools;

  // The reader's choices, stored for the reload of the page of a running run
  const chosen = Object.assign(
    { axis: "tokens", logX: false, smooth: 0, seeds: "bands", from: null, to: null, hidden: {}, log: {}, all: {} },
    loadChoices(),
  );

  function loadChoices() {
    try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; }
  }

  function saveChoices() {
    try { sessionStorage.setItem(KEY, JSON.stringify(chosen)); } catch { /* the choices are optional */ }
  }

  // The horizontal axis is linear in `scaled(position)`
  const scaled = (position) => (chosen.logX ? Math.log10(position) : position);
  const unscaled = (value) => (chosen.logX ? 10 ** value : value);
  const isPlaced = (position) => position !== null && (!chosen.logX || position > 0);

  function short(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    const round = (number) => String(Number(number.toPrecision(4)));
    if (size < 1e-3 || size >= 1e15) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    if (size < 1e4) return round(value);
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]]) if (size >= unit) return round(value / unit) + suffix;
    return round(value / 1e3) + "k";
  }

  function make(name, attributes, parent) {
    const element = document.createElementNS(svgNamespace, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  }

  function steps(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    const ticks = [];
    for (let i = first; i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  }

  function powers(low, high) {
    const ticks = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
      for (const part of high - low < 2 ? [1, 2, 5] : [1]) ticks.push(power + Math.log10(part));
    }
    const within = ticks.filter((tick) => tick >= low && tick <= high);
    return within.length > 1 ? within : [low, high];
  }

  // Centred moving average, which does not shift peaks
  function smoothed(values, reach) {
    const sums = [0], counts = [0];
    values.forEach((value, i) => {
      sums.push(sums[i] + (value ?? 0));
      counts.push(counts[i] + (value === null ? 0 : 1));
    });
    return values.map((value, i) => {
      const low = Math.max(0, i - reach), high = Math.min(values.length, i + reach + 1);
      const count = counts[high] - counts[low];
      return value === null || count === 0 ? null : (sums[high] - sums[low]) / count;
    });
  }

  // Return the index of the visible point nearest to a position
  function nearest(places, wanted, [from, to]) {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] === null || places[middle] < wanted) low = middle; else high = middle;
    }
    const near = Math.abs(places[low] - wanted) <= Math.abs(places[high] - wanted) ? low : high;
    if (places[near] < from) return Math.min(near + 1, places.length - 1);
    return places[near] > to ? Math.max(near - 1, 0) : near;
  }

  function quantile(sorted, fraction) {
    const at = fraction * (sorted.length - 1), low = Math.floor(at);
    return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
  }

  // Return the range without outliers, as robust_range.py; null if all values are in it
  function robustRange(values) {
    if (values.length < MIN_VALUES) return null;
    const sorted = Float64Array.from(values).sort();
    const smallest = sorted[0], largest = sorted[sorted.length - 1];
    const low = quantile(sorted, QUANTILE), high = quantile(sorted, 1 - QUANTILE);
    const reach = REACH * (high - low);
    const range = [Math.max(smallest, low - reach), Math.min(largest, high + reach)];
    return reach > 0 && largest - smallest > MIN_GAIN * (range[1] - range[0]) ? range : null;
  }

  // Return the positions of a curve on the chosen axis
  function getPlaces(series) {
    if (chosen.axis !== "flops") return series[chosen.axis];
    const factor = series.flopsPerToken ?? null;
    series.flops ??= series.tokens?.map((count) => (count === null || factor === null ? null : count * factor));
    return series.flops;
  }

  class Plot {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.name = this.data.name;
      this.cursor = null;
      const still = figure.querySelector("svg");
      still.classList.add("still");
      this.area = document.createElement("div");
      this.area.className = "area";
      still.after(this.area);
      this.svg = make("svg", { role: "application", tabindex: "0", class: "plot", "aria-roledescription": "interactive figure",
        "aria-label": still.getAttribute("aria-label"), "aria-describedby": "plot-help" }, this.area);
      this.readout = document.createElement("output");
      this.readout.hidden = true;
      this.area.append(this.readout);
      this.addChoices();
      this.addListeners();
      figure.classList.add("live");
      new ResizeObserver(() => this.draw()).observe(this.area);
    }

    addChoices() {
      const row = document.createElement("div");
      row.className = "choices";
      row.setAttribute("role", "group");
      row.setAttribute("aria-label", `${this.data.title}: what is shown`);
      this.area.before(row);
      this.toggles = this.data.series.length > 1 ? this.data.series.map((series) => this.addToggle(series, row)) : [];
      const tools = document.createElement("span");
      tools.className = "tools";
      row.append(tools);
      this.everything = this.addSwitch("all values", chosen.all, tools);
      this.everything.classList.add("everything");
      this.scale = this.addSwitch("log y", chosen.log, tools);
      this.scale.classList.add("scale");
      button("SVG", () => this.saveSvg(), tools, `Save this view as SVG: ${this.data.title}`);
      button("CSV", () => this.saveCsv(), tools, `Save the visible curves as CSV: ${this.data.title}`);
    }

    addSwitch(text, choices, parent) {
      return button(text, () => {
        choices[this.name] = !choices[this.name];
        saveChoices();
        this.draw();
      }, parent);
    }

    addToggle(series, row) {
      const shown = button("", () => {
        series.hidden = !series.hidden;
        shown.setAttribute("aria-pressed", String(!series.hidden));
        chosen.hidden[this.name] = this.data.series.filter((one) => one.hidden).map((one) => one.label);
        saveChoices();
        this.draw();
      }, row);
      const line = make("svg", { width: 26, height: 8, "aria-hidden": "true" }, shown);
      this.paint(make("path", { d: "M0 4H26" }, line), series);
      shown.append(` ${series.label}`);
      series.hidden = (chosen.hidden[this.name] ?? []).includes(series.label);
      shown.setAttribute("aria-pressed", String(!series.hidden));
      return shown;
    }

    paint(path, series, strength = 1) {
      path.style.stroke = `var(${series.colour})`;
      path.style.strokeDasharray = DASHES[series.dashes];
      path.style.strokeWidth = series.label === "mean" || series.kind === "band" ? "2.2" : "1.5";
      path.style.fill = "none";
      path.style.opacity = String(strength);
    }

    // Return True if a curve belongs to the chosen view of seeds
    isOffered(series) {
      return !series.kind || (series.kind === "band") === (chosen.seeds === "bands");
    }

    // Return the visible curves and the smoothed visible curves
    lines() {
      const shown = this.data.series.filter((series) => !series.hidden && this.isOffered(series));
      const raw = shown.map((series) => ({ series, places: getPlaces(series), values: series.values }));
      if (!this.data.smooth || !chosen.smooth) return [raw, []];
      const smooth = shown.map((series) => {
        const from = series.means ?? series;
        if (from !== series) from.flopsPerToken = series.flopsPerToken;
        const reach = Math.max(1, Math.round(from.values.length * chosen.smooth / 2));
        return { series, places: getPlaces(from), values: smoothed(from.values, reach) };
      });
      return [raw, smooth];
    }

    getFullRange() {
      let low = Infinity, high = -Infinity;
      for (const series of this.data.series) {
        for (const place of getPlaces(series)) {
          if (!isPlaced(place)) continue;
          low = Math.min(low, place);
          high = Math.max(high, place);
        }
      }
      return low <= high ? [low, high] : [chosen.logX ? 1 : 0, 10];
    }

    getRange() {
      let [low, high] = chosen.from === null ? this.getFullRange() : [chosen.from, chosen.to];
      if (low === high) [low, high] = chosen.logX ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
      return [low, high];
    }

    computeValueRange(lines, low, high, log) {
      const visible = [];
      let bottom = Infinity, top = -Infinity;
      for (const { series, places, values } of lines) {
        values.forEach((value, i) => {
          if (value === null || !isPlaced(places[i]) || places[i] < low || places[i] > high || (log && value <= 0)) return;
          const error = series.errors?.[i] ?? 0;
          visible.push(value);
          bottom = Math.min(bottom, log ? value : value - error, ...(series.lows && (!log || series.lows[i] > 0) ? [series.lows[i]] : []));
          top = Math.max(top, value + error, series.highs?.[i] ?? -Infinity);
        });
      }
      this.hasOutliers = false;
      if (bottom > top) return [0, 1];
      const robust = log ? null : robustRange(visible);
      if (robust) {
        this.hasOutliers = true;
        if (!chosen.all[this.name]) [bottom, top] = robust;
      }
      if (log) [bottom, top] = [Math.log10(bottom), Math.log10(top)];
      else for (const value of this.data.atLeast) { bottom = Math.min(bottom, value); top = Math.max(top, value); }
      const margin = (top - bottom) * 0.05 || Math.abs(top) * 0.05 || 1;
      return [bottom - margin, top + margin];
    }

    draw() {
      const width = this.area.clientWidth;
      if (!width) return;
      const log = Boolean(chosen.log[this.name]);
      this.scale.setAttribute("aria-pressed", String(log));
      this.toggles.forEach((toggle, i) => { toggle.hidden = !this.isOffered(this.data.series[i]); });
      this.width = width;
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      const [low, high] = this.getRange();
      const [raw, smooth] = this.lines();
      const [bottom, top] = this.computeValueRange(raw, low, high, log);
      this.everything.hidden = !this.hasOutliers;
      this.everything.setAttribute("aria-pressed", String(Boolean(chosen.all[this.name])));
      const right = width - RIGHT, floor = HEIGHT - BOTTOM;
      const begin = scaled(low), breadth = scaled(high) - begin;
      this.x = (place) => LEFT + (scaled(place) - begin) / breadth * (right - LEFT);
      this.y = (value) => floor - ((log ? Math.log10(value) : value) - bottom) / (top - bottom) * (floor - TOP);
      this.place = (x) => unscaled(begin + (Math.min(Math.max(x, LEFT), right) - LEFT) / (right - LEFT) * breadth);
      this.axes(low, high, bottom, top, log);
      const clip = make("svg", { x: LEFT, y: TOP, width: right - LEFT, height: floor - TOP,
        viewBox: `${LEFT} ${TOP} ${right - LEFT} ${floor - TOP}` }, this.svg);
      this.marks(clip);
      for (const line of raw) if (line.series.lows) this.band(clip, line, log);
      for (const line of raw) this.line(clip, line, low, high, log, smooth.length ? 0.3 : 1);
      for (const line of smooth) this.line(clip, line, low, high, log, 1);
      if (this.hasOutliers && !chosen.all[this.name]) this.outliers(raw, low, high);
      this.over = make("g", {}, this.svg);
      this.raw = raw;
      if (this.cursor !== null) this.showReadout(this.cursor);
    }

    axes(low, high, bottom, top, log) {
      const right = this.width - RIGHT, floor = HEIGHT - BOTTOM;
      const count = this.width > 420 ? 6 : 4;
      for (const tick of chosen.logX ? powers(scaled(low), scaled(high)) : steps(low, high, count)) {
        const place = unscaled(tick), x = this.x(place);
        make("path", { class: "grid", d: `M${x} ${TOP}V${floor}` }, this.svg);
        make("text", { x, y: floor + 16, "text-anchor": "middle" }, this.svg).textContent = short(place);
      }
      for (const tick of log ? powers(bottom, top) : steps(bottom, top, 6)) {
        const y = floor - (tick - bottom) / (top - bottom) * (floor - TOP);
        make("path", { class: "grid", d: `M${LEFT} ${y}H${right}` }, this.svg);
        make("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.svg).textContent = short(log ? 10 ** tick : tick);
      }
      make("path", { class: "frame", d: `M${LEFT} ${TOP}V${floor}H${right}` }, this.svg);
      make("text", { x: (LEFT + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, this.svg).textContent = NAMES[chosen.axis];
      const middle = (TOP + floor) / 2;
      make("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, this.svg)
        .textContent = this.data.unit;
    }

    marks(parent) {
      for (const [kind, dashes] of [["resumed", "dashed"], ["changed", "solid"], ["phases", "dotted"]]) {
        for (const place of getPlaces(this.data[kind]) ?? []) {
          if (!isPlaced(place)) continue;
          make("path", { class: "mark", d: `M${this.x(place)} 0V${HEIGHT}` }, parent).style.strokeDasharray = DASHES[dashes];
        }
      }
    }

    // Mark the columns with values above or below the axis by triangles at its edge
    outliers(lines, low, high) {
      const marked = new Set(), floor = HEIGHT - BOTTOM;
      for (const { series, places, values } of lines) {
        values.forEach((value, i) => {
          if (value === null || !isPlaced(places[i]) || places[i] < low || places[i] > high) return;
          const y = this.y(value), isAbove = y < TOP;
          if (!isAbove && y <= floor) return;
          const x = this.x(places[i]), column = `${isAbove} ${Math.round(x / MARK_SPACING)}`;
          if (marked.has(column)) return;
          marked.add(column);
          const d = isAbove ? `M${x} ${TOP - 7}l4 7h-8z` : `M${x} ${floor + 7}l4 -7h-8z`;
          const mark = make("path", { class: "outlier", d }, this.svg);
          mark.style.fill = `var(${series.colour})`;
          make("title", {}, mark).textContent = `${short(value)}, outside of the axis`;
        });
      }
    }

    band(parent, { series, places }, log) {
      const up = [], down = [];
      places.forEach((place, i) => {
        const { [i]: bottom } = series.lows, { [i]: top } = series.highs;
        if (bottom === null || top === null || !isPlaced(place) || (log && top <= 0)) return;
        up.push(`${this.x(place).toFixed(1)} ${this.y(top).toFixed(1)}`);
        down.push(`${this.x(place).toFixed(1)} ${this.y(log ? Math.max(bottom, top / 100) : bottom).toFixed(1)}`);
      });
      if (!up.length) return;
      make("path", { class: "band", d: `M${[...up, ...down.reverse()].join("L")}Z` }, parent).style.fill = `var(${series.colour})`;
    }

    line(parent, { series, places, values }, low, high, log, strength) {
      const parts = [], dots = values.length < FEW_POINTS;
      let pen = "M";
      for (let i = 0; i < values.length; i++) {
        const value = values[i], place = places[i];
        if (value === null || !isPlaced(place) || (log && value <= 0)) { pen = "M"; continue; }
        // Include one point beyond each end, so that lines are clipped at the edge
        if ((places[i + 1] ?? low) < low || (places[i - 1] ?? high) > high) { pen = "M"; continue; }
        parts.push(`${pen}${this.x(place).toFixed(1)} ${this.y(value).toFixed(1)}`);
        pen = "L";
        if (dots) this.dot(parent, series, place, value, strength);
        const error = series.errors?.[i];
        if (error) {
          const foot = log ? Math.max(value - error, value / 100) : value - error;
          const bar = make("path", { d: `M${this.x(place)} ${this.y(foot)}V${this.y(value + error)}` }, parent);
          bar.style.stroke = `var(${series.colour})`;
        }
      }
      const path = make("path", { class: "curve", d: parts.join("") }, parent);
      this.paint(path, series, strength);
    }

    dot(parent, series, place, value, strength = 1) {
      const dot = make("circle", { cx: this.x(place), cy: this.y(value), r: 3 }, parent);
      dot.style.fill = `var(${series.colour})`;
      dot.style.opacity = String(strength);
    }

    // Display the values of all visible curves nearest to a position
    showReadout(place) {
      this.over.replaceChildren();
      const log = Boolean(chosen.log[this.name]);
      const [low, high] = this.getRange();
      const found = this.raw.flatMap(({ series, places, values }) => {
        const i = places.length ? nearest(places, place, [low, high]) : 0;
        return values[i] == null || !isPlaced(places[i]) || places[i] < low || places[i] > high
          ? [] : [{ series, i, at: places[i], value: values[i] }];
      });
      this.readout.hidden = !found.length;
      if (!found.length) return;
      const [{ series: first, i, at }] = found;
      make("path", { class: "cursor", d: `M${this.x(at)} ${TOP}V${HEIGHT - BOTTOM}` }, this.over);
      for (const { series, at: there, value } of found) {
        const y = log && value <= 0 ? -1 : this.y(value);
        if (y >= TOP && y <= HEIGHT - BOTTOM) this.dot(this.over, series, there, value);
      }
      const count = (number) => number === null ? "?" : number.toLocaleString("en-US");
      const where = `step ${count(first.steps[i])}, ${count(first.tokens[i])} tokens` +
        (first.hours[i] === null ? "" : `, ${first.hours[i].toPrecision(4)} h`) +
        (first.flopsPerToken && first.tokens[i] !== null ? `, ${short(first.tokens[i] * first.flopsPerToken)} FLOPs` : "");
      this.readout.replaceChildren();
      for (const text of [where, ...found.map((one) => this.formatValue(one))]) {
        const line = document.createElement("div");
        line.textContent = text;
        this.readout.append(line);
      }
      const half = this.readout.offsetWidth / 2;
      this.readout.style.left = `${Math.min(Math.max(this.x(at) - half, 0), Math.max(0, this.width - 2 * half))}px`;
    }

    formatValue({ series, i, value }) {
      const number = Number(value.toPrecision(6));
      const error = series.errors?.[i];
      let text = error ? `${number} ± ${short(error)}` : `${number}`;
      if (series.lows) text += ` (${short(series.lows[i])} to ${short(series.highs[i])})`;
      return this.data.series.length > 1 ? `${series.label}: ${text}` : `${text} ${this.data.unit}`;
    }

    hideReadout() {
      this.cursor = null;
      this.readout.hidden = true;
      this.over?.replaceChildren();
    }

    // Save the figure as it is drawn, with its title and the labels of the curves
    saveSvg() {
      this.hideReadout();
      const labels = this.raw.length > 1 ? this.raw.map(({ series }) => series) : [];
      const above = 24 + 16 * labels.length;
      const copy = this.svg.cloneNode(true);
      for (const name of ["role", "tabindex", "aria-roledescription", "aria-describedby"]) copy.removeAttribute(name);
      copy.setAttribute("viewBox", `0 ${-above} ${this.width} ${HEIGHT + above}`);
      copy.setAttribute("width", this.width);
      copy.setAttribute("height", HEIGHT + above);
      const style = document.createElementNS(svgNamespace, "style");
      style.textContent = document.getElementById("palette").textContent + document.getElementById("plot-style").textContent;
      const paper = make("rect", { x: 0, y: -above, width: this.width, height: HEIGHT + above }, copy);
      paper.style.fill = "var(--paper)";
      copy.prepend(style, paper);
      const title = make("text", { x: 4, y: 16 - above, class: "title" }, copy);
      title.textContent = this.data.title;
      labels.forEach((series, i) => {
        const y = 34 - above + 16 * i;
        this.paint(make("path", { d: `M4 ${y - 4}h26` }, copy), series);
        make("text", { x: 36, y }, copy).textContent = series.label;
      });
      pageTools.download(`${this.name}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(copy));
    }

    saveCsv() {
      const columns = ["tokens", "steps", "hours"];
      const rows = this.raw.flatMap(({ series }) => series.values.map((value, i) => [
        series.label, ...columns.map((name) => series[name][i]),
        series.flopsPerToken && series.tokens[i] !== null ? series.tokens[i] * series.flopsPerToken : null,
        value, series.lows?.[i] ?? null, series.highs?.[i] ?? null, series.errors?.[i] ?? null,
      ]));
      const head = ["curve", ...columns, "flops", this.data.unit || this.data.title, "lowest seed", "highest seed", "standard error"];
      const used = head.map((_, column) => column < 6 || rows.some((row) => row[column] !== null));
      pageTools.downloadCsv(this.name, [head, ...rows].map((row) => row.filter((_, column) => used[column])));
    }

    addListeners() {
      const at = (event) => event.clientX - this.svg.getBoundingClientRect().left;
      let start = null, from = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        start = at(event);
        from = event.shiftKey ? this.getRange() : null;
        this.svg.setPointerCapture(event.pointerId);
      });
      this.svg.addEventListener("pointermove", (event) => {
        if (start === null) { this.cursor = this.place(at(event)); this.showReadout(this.cursor); return; }
        this.hideReadout();
        if (from) { move((start - at(event)) / (this.width - LEFT - RIGHT), from); return; }
        const [left, right] = [start, at(event)].map((x) => this.x(this.place(x))).sort((a, b) => a - b);
        make("rect", { class: "chosen", x: left, y: TOP, width: right - left, height: HEIGHT - TOP - BOTTOM }, this.over);
      });
      this.svg.addEventListener("pointerup", (event) => {
        const end = at(event);
        if (start !== null && !from && Math.abs(end - start) >= MIN_DRAG) {
          const places = [start, end].map((x) => this.place(x)).sort((a, b) => a - b);
          show(...places);
        }
        start = from = null;
        this.hideReadout();
      });
      this.svg.addEventListener("pointercancel", () => { start = from = null; this.hideReadout(); });
      this.svg.addEventListener("pointerleave", () => { if (start === null) this.hideReadout(); });
      this.svg.addEventListener("blur", () => this.hideReadout());
      this.svg.addEventListener("dblclick", () => show(null, null));
      this.svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.shiftKey) return;  // scroll the page
        event.preventDefault();
        const range = this.getRange(), turn = Math.sign(event.deltaY || event.deltaX);
        if (event.shiftKey) move(turn / 10, range); else zoom(turn > 0 ? 1.25 : 0.8, this.place(at(event)), range);
      }, { passive: false });
      this.svg.addEventListener("keydown", (event) => this.onKeyDown(event));
    }

    onKeyDown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const range = this.getRange(), [low, high] = range, [{ places } = { places: [] }] = this.raw;
      const middle = this.cursor ?? unscaled((scaled(low) + scaled(high)) / 2);
      const walk = (by) => {
        const now = this.cursor === null ? null : nearest(places, this.cursor, range);
        const next = now === null ? nearest(places, by > 0 ? low : high, range) : Math.min(Math.max(now + by, 0), places.length - 1);
        if (places[next] == null) return;
        this.cursor = Math.min(Math.max(places[next], low), high);
        this.showReadout(this.cursor);
      };
      const actions = {
        ArrowLeft: () => event.shiftKey ? move(-0.1, range) : walk(-1),
        ArrowRight: () => event.shiftKey ? move(0.1, range) : walk(1),
        PageUp: () => walk(-Math.ceil(places.length / 20)),
        PageDown: () => walk(Math.ceil(places.length / 20)),
        Home: () => { this.cursor = low; this.showReadout(low); },
        End: () => { this.cursor = high; this.showReadout(high); },
        "+": () => zoom(0.5, middle, range, true),
        "=": () => zoom(0.5, middle, range, true),
        "-": () => zoom(2, middle, range, true),
        "0": () => show(null, null),
        Escape: () => { this.hideReadout(); show(null, null); },
        l: () => this.scale.click(),
      };
      const act = actions[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }
  }

  const plots = [...document.querySelectorAll("figure[data-plot]")].map((figure) => new Plot(figure));
  const controls = document.getElementById("controls");
  if (!plots.length || !controls) return;
  const reset = controls.querySelector("#whole-run");

  function limits() {
    const ends = plots.map((plot) => plot.getFullRange());
    return [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high))];
  }

  // Set the range of all figures; null is the whole run
  function show(from, to) {
    const [low, high] = limits();
    if (from !== null) {
      from = Math.max(from, low);
      to = Math.min(to, high);
      if (scaled(to) - scaled(from) < (scaled(high) - scaled(low)) * MIN_RANGE) return;
      if (from <= low && to >= high) from = to = null;
    }
    Object.assign(chosen, { from, to });
    redraw();
  }

  // Move the range by a share of its length
  function move(share, [from, to]) {
    if (chosen.from === null) return;
    const [low, high] = limits().map(scaled), begin = scaled(from), end = scaled(to);
    const moved = Math.min(Math.max(share * (end - begin), low - begin), high - end);
    show(unscaled(begin + moved), unscaled(end + moved));
  }

  // Multiply the length of the range; the position keeps its place, or moves to the middle
  function zoom(factor, position, [from, to], isCentred = false) {
    const begin = scaled(from), breadth = scaled(to) - begin, at = scaled(position);
    const share = isCentred ? 0.5 : (at - begin) / breadth;
    show(unscaled(at - share * factor * breadth), unscaled(at + (1 - share) * factor * breadth));
  }

  function redraw() {
    saveChoices();
    reset.disabled = chosen.from === null;
    plots.forEach((plot) => plot.draw());
  }

  function chooseAxis(changes) {
    Object.assign(chosen, changes, { from: null, to: null });
    plots.forEach((plot) => plot.hideReadout());
    redraw();
  }

  const hasFlops = plots.some((plot) => plot.data.series.some((series) => series.flopsPerToken));
  if (chosen.axis === "flops" && !hasFlops) chosen.axis = "tokens";
  for (const choice of controls.querySelectorAll("input[name=axis]")) {
    if (choice.value === "flops") choice.parentElement.hidden = !hasFlops;
    choice.checked = choice.value === chosen.axis;
    choice.addEventListener("change", () => { if (choice.value in NAMES) chooseAxis({ axis: choice.value }); });
  }
  const logX = controls.querySelector("#log-x");
  logX.checked = chosen.logX;
  logX.addEventListener("change", () => chooseAxis({ logX: logX.checked }));
  for (const choice of controls.querySelectorAll("input[name=seeds]")) {
    choice.checked = choice.value === chosen.seeds;
    choice.addEventListener("change", () => { chosen.seeds = choice.value; redraw(); });
  }
  const smooth = controls.querySelector("select");
  if (smooth) {
    smooth.value = String(chosen.smooth);
    smooth.addEventListener("change", () => { chosen.smooth = Number(smooth.value); redraw(); });
  }
  reset.addEventListener("click", () => show(null, null));
  controls.hidden = false;
  document.getElementById("plot-help").hidden = false;
  redraw();
})();
