// Interactive figures: read-out, zoom, pan and selection of curves. The data are part of the page;
// without this script the page shows the same figures as static SVG.
"use strict";
(() => {
  const AXES = ["tokens", "steps", "hours"];
  const NAMES = { tokens: "tokens", steps: "steps", hours: "hours since the run began" };
  const LEFT = 62, RIGHT = 12, TOP = 10, BOTTOM = 40, HEIGHT = 270;
  const DASHES = { solid: "", dashed: "6 3", dashdot: "8 3 2 3", dotted: "2 3" };
  const MIN_DRAG = 6, MIN_RANGE = 1e-4, FEW_POINTS = 40;
  const KEY = `hlat ${location.pathname} ${document.title}`;
  const svgNamespace = document.querySelector("figure svg")?.namespaceURI;
  if (!svgNamespace) return;

  // The reader's choices, stored for the reload of the page of a running run
  const chosen = Object.assign({ axis: "tokens", smooth: 0, from: null, to: null, hidden: {}, log: {} }, loadChoices());

  function loadChoices() {
    try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; }
  }

  function saveChoices() {
    try { sessionStorage.setItem(KEY, JSON.stringify(chosen)); } catch { /* the choices are optional */ }
  }

  function short(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    const round = (number) => String(Number(number.toPrecision(4)));
    if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
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

  function button(text, act, parent) {
    const element = document.createElement("button");
    element.type = "button";
    element.textContent = text;
    element.addEventListener("click", act);
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
      this.choices();
      this.addListeners();
      figure.classList.add("live");
      new ResizeObserver(() => this.draw()).observe(this.area);
    }

    choices() {
      const row = document.createElement("div");
      row.className = "choices";
      row.setAttribute("role", "group");
      row.setAttribute("aria-label", `${this.data.title}: what is shown`);
      this.area.before(row);
      if (this.data.series.length > 1) this.data.series.forEach((series, i) => this.toggle(series, i, row));
      const scale = button("log scale", () => {
        chosen.log[this.name] = !chosen.log[this.name];
        saveChoices();
        this.draw();
      }, row);
      scale.className = "scale";
      this.scale = scale;
    }

    toggle(series, i, row) {
      const hidden = new Set(chosen.hidden[this.name] ?? []);
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
      series.hidden = hidden.has(series.label);
      shown.setAttribute("aria-pressed", String(!series.hidden));
    }

    paint(path, series, strength = 1) {
      path.style.stroke = `var(${series.colour})`;
      path.style.strokeDasharray = DASHES[series.dashes];
      path.style.strokeWidth = series.label === "mean" ? "2.2" : "1.5";
      path.style.fill = "none";
      path.style.opacity = String(strength);
    }

    // Return the visible curves and the smoothed visible curves
    lines() {
      const shown = this.data.series.filter((series) => !series.hidden);
      const raw = shown.map((series) => ({ series, places: series[chosen.axis], values: series.values }));
      if (!this.data.smooth || !chosen.smooth) return [raw, []];
      const smooth = shown.map((series) => {
        const from = series.means ?? series;
        const reach = Math.max(1, Math.round(from.values.length * chosen.smooth / 2));
        return { series, places: from[chosen.axis], values: smoothed(from.values, reach) };
      });
      return [raw, smooth];
    }

    getFullRange() {
      const places = this.data.series.flatMap((series) => {
        const known = series[chosen.axis].filter((place) => place !== null);
        return known.length ? [known[0], known[known.length - 1]] : [];
      });
      return places.length ? [Math.min(...places), Math.max(...places)] : [0, 1];
    }

    getRange() {
      let [low, high] = chosen.from === null ? this.getFullRange() : [chosen.from, chosen.to];
      if (low === high) { low -= 0.5; high += 0.5; }
      return [low, high];
    }

    computeValueRange(lines, low, high, log) {
      let bottom = Infinity, top = -Infinity;
      for (const { series, places, values } of lines) {
        values.forEach((value, i) => {
          if (value === null || places[i] === null || places[i] < low || places[i] > high || (log && value <= 0)) return;
          const error = series.errors?.[i] ?? 0;
          bottom = Math.min(bottom, log ? value : value - error);
          top = Math.max(top, value + error);
        });
      }
      if (bottom > top) return [0, 1];
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
      this.width = width;
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      const [low, high] = this.getRange();
      const [raw, smooth] = this.lines();
      const [bottom, top] = this.computeValueRange(raw, low, high, log);
      const right = width - RIGHT, floor = HEIGHT - BOTTOM;
      this.x = (place) => LEFT + (place - low) / (high - low) * (right - LEFT);
      this.y = (value) => floor - ((log ? Math.log10(value) : value) - bottom) / (top - bottom) * (floor - TOP);
      this.place = (x) => low + (Math.min(Math.max(x, LEFT), right) - LEFT) / (right - LEFT) * (high - low);
      this.axes(low, high, bottom, top, log);
      const clip = make("svg", { x: LEFT, y: TOP, width: right - LEFT, height: floor - TOP,
        viewBox: `${LEFT} ${TOP} ${right - LEFT} ${floor - TOP}` }, this.svg);
      this.marks(clip);
      for (const line of raw) this.line(clip, line, low, high, log, smooth.length ? 0.3 : 1);
      for (const line of smooth) this.line(clip, line, low, high, log, 1);
      this.over = make("g", {}, this.svg);
      this.raw = raw;
      if (this.cursor !== null) this.showReadout(this.cursor);
    }

    axes(low, high, bottom, top, log) {
      const right = this.width - RIGHT, floor = HEIGHT - BOTTOM;
      for (const tick of steps(low, high, this.width > 420 ? 6 : 4)) {
        const x = LEFT + (tick - low) / (high - low) * (right - LEFT);
        make("path", { class: "grid", d: `M${x} ${TOP}V${floor}` }, this.svg);
        make("text", { x, y: floor + 16, "text-anchor": "middle" }, this.svg).textContent = short(tick);
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
      for (const [kind, dashes] of [["resumed", "dashed"], ["phases", "dotted"]]) {
        for (const place of this.data[kind][chosen.axis] ?? []) {
          if (place === null) continue;
          make("path", { class: "mark", d: `M${this.x(place)} 0V${HEIGHT}` }, parent).style.strokeDasharray = DASHES[dashes];
        }
      }
    }

    line(parent, { series, places, values }, low, high, log, strength) {
      const parts = [], dots = values.length < FEW_POINTS;
      let pen = "M";
      for (let i = 0; i < values.length; i++) {
        const value = values[i], place = places[i];
        if (value === null || place === null || (log && value <= 0)) { pen = "M"; continue; }
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

    // Display the values nearest to a position
    showReadout(place) {
      this.over.replaceChildren();
      const log = Boolean(chosen.log[this.name]);
      const [low, high] = this.getRange();
      const found = this.raw.flatMap(({ series, places, values }) => {
        const i = places.length ? nearest(places, place, [low, high]) : 0;
        return values[i] == null || places[i] < low || places[i] > high ? [] : [{ series, i, at: places[i], value: values[i] }];
      });
      this.readout.hidden = !found.length;
      if (!found.length) return;
      const [{ series: first, i, at }] = found;
      make("path", { class: "cursor", d: `M${this.x(at)} ${TOP}V${HEIGHT - BOTTOM}` }, this.over);
      for (const { series, at: there, value } of found) if (!log || value > 0) this.dot(this.over, series, there, value);
      const count = (number) => number === null ? "?" : number.toLocaleString("en-US");
      const where = `step ${count(first.steps[i])}, ${count(first.tokens[i])} tokens` +
        (first.hours[i] === null ? "" : `, ${first.hours[i].toPrecision(4)} h`);
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
      const text = error ? `${number} ± ${short(error)}` : `${number}`;
      return this.data.series.length > 1 ? `${series.label}: ${text}` : `${text} ${this.data.unit}`;
    }

    hideReadout() {
      this.cursor = null;
      this.readout.hidden = true;
      this.over?.replaceChildren();
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
        if (from) {
          const [low, high] = from;
          move((start - at(event)) / (this.width - LEFT - RIGHT) * (high - low), from);
          return;
        }
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
      this.svg.addEventListener("keydown", (event) => this.onKeyDown(event));
    }

    onKeyDown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const [low, high] = this.getRange(), [{ places } = { places: [] }] = this.raw;
      const middle = this.cursor ?? (low + high) / 2, breadth = high - low;
      const walk = (by) => {
        const now = this.cursor === null ? null : nearest(places, this.cursor, [low, high]);
        const next = now === null ? nearest(places, by > 0 ? low : high, [low, high]) : Math.min(Math.max(now + by, 0), places.length - 1);
        if (places[next] == null) return;
        this.cursor = Math.min(Math.max(places[next], low), high);
        this.showReadout(this.cursor);
      };
      const actions = {
        ArrowLeft: () => event.shiftKey ? move(-breadth / 10, [low, high]) : walk(-1),
        ArrowRight: () => event.shiftKey ? move(breadth / 10, [low, high]) : walk(1),
        PageUp: () => walk(-Math.ceil(places.length / 20)),
        PageDown: () => walk(Math.ceil(places.length / 20)),
        Home: () => { this.cursor = low; this.showReadout(low); },
        End: () => { this.cursor = high; this.showReadout(high); },
        "+": () => show(middle - breadth / 4, middle + breadth / 4),
        "=": () => show(middle - breadth / 4, middle + breadth / 4),
        "-": () => show(middle - breadth, middle + breadth),
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
  const reset = controls.querySelector("button");

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
      if (to - from < (high - low) * MIN_RANGE) return;
      if (from <= low && to >= high) from = to = null;
    }
    Object.assign(chosen, { from, to });
    redraw();
  }

  function move(by, [from, to]) {
    if (chosen.from === null) return;
    const [low, high] = limits();
    const moved = Math.min(Math.max(by, low - from), high - to);
    show(from + moved, to + moved);
  }

  function redraw() {
    saveChoices();
    reset.disabled = chosen.from === null;
    plots.forEach((plot) => plot.draw());
  }

  for (const choice of controls.querySelectorAll("input[name=axis]")) {
    choice.checked = choice.value === chosen.axis;
    choice.addEventListener("change", () => {
      if (AXES.includes(choice.value)) Object.assign(chosen, { axis: choice.value, from: null, to: null });
      plots.forEach((plot) => plot.hideReadout());
      redraw();
    });
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
