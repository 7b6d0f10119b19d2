// The legend of a figure, whose entries hide and show what they stand for; and a panel's controls.

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function legend(figure, place, hidden, redraw) {
  place.replaceChildren();
  const seen = new Map();
  for (const panel of figure.panels) {
    const colours = panel.boxes ? panel.boxes.colours : [];
    const ramp = colours.filter((colour) => colour[3]);
    if (ramp.length) seen.set("ramp", ["ramp", ramp]);
    for (const colour of colours) if (!colour[3]) seen.set(colour[0], ["box", [colour]]);
    for (const line of panel.lines) {
      const kind = line.fill ? "box" : line.join ? "line" : "point";
      seen.set(line.label, [kind, [line.colour]]);
    }
  }
  for (const [key, [kind, colours]] of seen) place.append(entry(key, kind, colours, hidden, redraw));
}

function entry(key, kind, colours, hidden, redraw) {
  const button = element("button");
  const swatch = element("span", `swatch ${kind}`);
  const last = colours.at(-1);
  const shown = colours.map(shade);
  swatch.style.background = colours.length > 1 ? `linear-gradient(to right, ${shown})` : shown[0];
  button.type = "button";
  if (colours.length > 1) button.append(colours[0][0], swatch, last[0]);
  else button.append(swatch, last[0] || key);
  if (kind !== "ramp" && !last[0]) button.lastChild.textContent = key;
  button.title = "hide or show";
  button.setAttribute("aria-pressed", String(!hidden.has(key)));
  button.addEventListener("click", () => {
    if (!hidden.delete(key)) hidden.add(key);
    button.setAttribute("aria-pressed", String(!hidden.has(key)));
    redraw();
  });
  return button;
}

function controls(chart) {
  const bar = element("div", "bar");
  bar.append(element("h3", "", chart.panel.title));
  for (const [text, says, act] of [
    ["+", "zoom in", () => chart.zoomAll(0.5)],
    ["−", "zoom out", () => chart.zoomAll(2)],
    ["reset", "show all of it", () => chart.reset()],
  ]) {
    const button = element("button", "", text);
    button.type = "button";
    button.title = says;
    button.setAttribute("aria-label", says);
    button.addEventListener("click", act);
    bar.append(button);
  }
  return bar;
}

Object.assign(Chart.prototype, {
  listen() {
    const { canvas } = this;
    let held = null;
    canvas.addEventListener("wheel", (event) => {
      // A page scrolls on until the figure is meant: clicked at, or with a key held.
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoomAt(Math.exp(event.deltaY * 0.0016), event.offsetX, event.offsetY, event.shiftKey);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      held = [event.offsetX, event.offsetY];
      canvas.focus({ preventScroll: true });
      if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const { offsetX, offsetY } = event;
      if (held && event.buttons) {
        this.x.pan((held[0] - offsetX) / (this.x.to - this.x.from));
        if (!this.panel.y.lanes.length) this.y.pan((held[1] - offsetY) / (this.y.to - this.y.from));
        held = [offsetX, offsetY];
        this.later();
        this.hide();
      } else this.show(offsetX, offsetY);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (held = null));
    canvas.addEventListener("pointerleave", () => this.hide());
    canvas.addEventListener("dblclick", (event) => this.zoomAt(0.4, event.offsetX, event.offsetY));
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: ["x", -0.15], ArrowRight: ["x", 0.15], ArrowUp: ["y", 0.15], ArrowDown: ["y", -0.15] };
      if (moves[event.key]) this[moves[event.key][0]].pan(moves[event.key][1]);
      else if (event.key === "+" || event.key === "=") this.zoomAll(0.7);
      else if (event.key === "-") this.zoomAll(1 / 0.7);
      else if (event.key === "0" || event.key === "Escape") this.reset();
      else return;
      event.preventDefault();
      this.later();
    });
  },

  zoomAt(factor, px, py, xOnly = false) {
    this.x.zoom(factor, px);
    if (!xOnly && !this.panel.y.lanes.length) this.y.zoom(factor, py);
    this.later();
    this.hide();
  },

  zoomAll(factor) {
    this.zoomAt(factor, (this.x.from + this.x.to) / 2, (this.y.from + this.y.to) / 2);
  },

  reset() {
    this.x.reset();
    this.y.reset();
    this.later();
  },

  show(px, py) {
    const found = this.under(px, py), { hover, canvas } = this;
    if (!found) return this.hide();
    const [title, rows] = found;
    const table = element("table");
    for (const [what, text] of rows) {
      const row = table.insertRow();
      row.insertCell().textContent = what;
      row.insertCell().textContent = text;
    }
    hover.replaceChildren(element("b", "", title), table);
    hover.style.display = "block";
    const right = px + 16 + hover.offsetWidth > canvas.clientWidth;
    const below = py + 16 + hover.offsetHeight > canvas.clientHeight;
    hover.style.left = `${Math.max(0, right ? px - hover.offsetWidth - 12 : px + 14)}px`;
    hover.style.top = `${Math.max(0, below ? py - hover.offsetHeight - 12 : py + 14)}px`;
  },

  hide() {
    this.hover.style.display = "none";
  },
});
