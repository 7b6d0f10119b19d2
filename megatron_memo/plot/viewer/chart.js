// One panel on a canvas, as far as it is seen.

const EDGE = { right: 14, bottom: 42, top: 10, bands: 20 };
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A colour is [what, on light, on dark, of a ramp].
function shade(colour) {
  return colour[isDark() ? 2 : 1];
}

class Chart {
  constructor(panel, canvas, hover, hidden) {
    Object.assign(this, { panel, canvas, hover, hidden });
    this.pen = canvas.getContext("2d");
    const { boxes, lines, limits } = panel;
    const xs = [], ys = [];
    if (boxes) [xs, ys].forEach((all, k) => all.push(k ? [boxes.y0, boxes.y1] : [boxes.x0, boxes.x1]));
    const every = (pairs, of) => [...pairs.flat(), ...lines.map((line) => line[of])];
    const marks = (of) => limits.map((limit) => limit[of]).filter((at) => at !== null);
    this.x = Scale.over(panel.x, chained([...every(xs, "x"), marks("x")]));
    this.y = Scale.over(panel.y, chained([...every(ys, "y"), marks("y")]));
    if (!panel.x.log && (boxes || panel.bands.length)) tight(this.x, chained(every(xs, "x")));
    this.order = boxes ? byColour(boxes) : [];
    this.listen();
    new ResizeObserver(() => this.later()).observe(canvas);
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  // ---- drawing

  draw() {
    const { canvas, pen, panel, x, y } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = FONT;
    pen.fillStyle = ink("plot");
    pen.fillRect(0, 0, width, height);
    const up = panel.y.lanes.length ? ["", []] : y.ticks(height / 60);
    const names = panel.y.lanes.length ? panel.y.lanes : up[1].map(([, text]) => text);
    const wide = Math.max(...names.map((name) => pen.measureText(name).width), 20);
    const top = EDGE.top + (panel.bands.length ? EDGE.bands : 0);
    [x.from, x.to] = [wide + (panel.y.label ? 30 : 14), width - EDGE.right];
    [y.from, y.to] = [height - EDGE.bottom, top];
    if (panel.y.lanes.length) [y.from, y.to] = [y.to, y.from];
    this.frame = { left: x.from, right: x.to, top, bottom: height - EDGE.bottom };
    this.grid(up);
    pen.save();
    pen.beginPath();
    pen.rect(x.from, top, x.to - x.from, this.frame.bottom - top);
    pen.clip();
    if (panel.boxes) this.boxes();
    for (const line of panel.lines) if (!this.hidden.has(line.label)) this.line(line);
    for (const limit of panel.limits) this.limit(limit);
    pen.restore();
    this.bands();
  }

  grid([unit, ticks]) {
    const { pen, x, y, panel, frame } = this;
    const [across, places] = x.ticks((x.to - x.from) / (x.axis.log ? 60 : 95));
    pen.strokeStyle = ink("grid");
    pen.fillStyle = ink("faint");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const [value, text] of places) {
      const at = Math.round(x.at(value)) + 0.5;
      pen.moveTo(at, frame.top);
      pen.lineTo(at, frame.bottom + 4);
      pen.fillText(text, at, frame.bottom + 7);
    }
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [value, text] of ticks) {
      const at = Math.round(y.at(value)) + 0.5;
      pen.moveTo(frame.left - 4, at);
      pen.lineTo(frame.right, at);
      pen.fillText(text, frame.left - 7, at);
    }
    panel.y.lanes.forEach((lane, row) => pen.fillText(lane, frame.left - 7, y.at(row + 0.5)));
    pen.stroke();
    pen.fillStyle = ink("ink");
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    pen.fillText(x.label(across), (frame.left + frame.right) / 2, frame.bottom + 36);
    if (!panel.y.label) return;
    pen.save();
    pen.translate(13, (frame.top + frame.bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(y.label(unit), 0, 0);
    pen.restore();
  }

  boxes() {
    const { pen, x, y, order, frame } = this;
    const { boxes, y: axis } = this.panel;
    const paper = ink("plot");
    let colour = -1, shown = true;
    const large = [];
    for (const k of order) {
      if (boxes.colour[k] !== colour) {
        colour = boxes.colour[k];
        shown = !this.hidden.has(group(boxes.colours[colour]));
        pen.fillStyle = shade(boxes.colours[colour]);
      }
      if (!shown) continue;
      const left = x.at(boxes.x0[k]), right = x.at(boxes.x1[k]);
      if (right < frame.left || left > frame.right) continue;
      const one = y.at(boxes.y0[k]), other = y.at(boxes.y1[k]);
      const above = Math.min(one, other), below = Math.max(one, other);
      if (below < frame.top || above > frame.bottom) continue;
      const width = Math.max(right - left, 1), height = Math.max(below - above, 1);
      pen.fillRect(left, above, width, height);
      if (width > 7 && height > 7) large.push([left, above, width, height, k]);
    }
    pen.strokeStyle = paper;
    pen.lineWidth = 1;
    for (const [left, above, width, height] of large) pen.strokeRect(left, above, width, height);
    const operators = !axis.lanes.length && boxes.facts.find((fact) => fact.label === "by");
    this.names(large, operators || boxes.facts[0]);
  }

  // Of boxes with room for it.
  names(large, fact) {
    if (!fact || !fact.names.length) return;
    const { pen, frame, panel } = this;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (const [left, above, width, height, k] of large) {
      const from = Math.max(left, frame.left), room = Math.min(left + width, frame.right) - from;
      if (room < 60 || height < 15) continue;
      const text = fact.names[fact.values[k]];
      if (pen.measureText(text).width > room - 10) continue;
      pen.fillStyle = contrast(shade(panel.boxes.colours[panel.boxes.colour[k]]));
      const top = Math.max(above, frame.top), low = Math.min(above + height, frame.bottom);
      pen.fillText(text, from + 5, (top + low) / 2);
    }
  }

  line(line) {
    const { pen, x, y } = this;
    const colour = shade(line.colour);
    const path = () => {
      pen.beginPath();
      line.x.forEach((value, k) => {
        const px = x.at(value), py = y.at(line.y[k]);
        if (!k) return pen.moveTo(px, py);
        if (line.steps) pen.lineTo(px, y.at(line.y[k - 1]));
        pen.lineTo(px, py);
      });
    };
    pen.strokeStyle = pen.fillStyle = colour;
    if (line.fill) {
      path();
      pen.lineTo(x.at(line.x.at(-1)), y.at(0));
      pen.lineTo(x.at(line.x[0]), y.at(0));
      pen.globalAlpha = 0.4;
      pen.fill();
      pen.globalAlpha = 1;
    }
    if (line.join) {
      path();
      pen.lineWidth = line.fill ? 1 : 2;
      pen.setLineDash(line.dashed ? [7, 4] : []);
      pen.stroke();
      pen.setLineDash([]);
    }
    if (line.markers) line.x.forEach((_, k) => this.marker(line, k, line.join ? 4 : 6));
    (line.ends || []).forEach((name, k) => {
      const at = k ? line.x.length - 1 : 0;
      pen.fillStyle = ink("faint");
      const px = x.at(line.x[at]), right = px + 60 < this.frame.right;
      pen.textAlign = right ? "left" : "right";
      pen.textBaseline = "middle";
      pen.fillText(name, right ? px + 9 : px - 9, y.at(line.y[at]));
    });
  }

  marker(line, k, size) {
    const { pen, x, y } = this;
    pen.beginPath();
    const px = x.at(line.x[k]), py = y.at(line.y[k]);
    if (line.join) pen.arc(px, py, size, 0, 7);
    else pen.rect(px - size + 1, py - size + 1, 2 * size - 2, 2 * size - 2);
    pen.fillStyle = line.hollow[k] ? ink("plot") : shade(line.colour);
    pen.strokeStyle = shade(line.colour);
    pen.lineWidth = 1.8;
    pen.fill();
    pen.stroke();
  }

  limit({ label, x, y }) {
    const { pen, frame } = this;
    pen.strokeStyle = pen.fillStyle = ink("ink");
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.textBaseline = "bottom";
    pen.textAlign = "right";
    if (y !== null) {
      const at = this.y.at(y);
      pen.moveTo(frame.left, at);
      pen.lineTo(frame.right, at);
      pen.fillText(label, frame.right - 4, at - 3);
    } else {
      const at = this.x.at(x);
      pen.moveTo(at, frame.top);
      pen.lineTo(at, frame.bottom);
      pen.save();
      pen.translate(at - 3, frame.top + 4);
      pen.rotate(-Math.PI / 2);
      pen.fillText(label, 0, 0);
      pen.restore();
    }
    pen.stroke();
    pen.setLineDash([]);
  }

  // Along the top; those of layers where most of them have room for their names.
  bands() {
    const { pen, x, panel, frame } = this;
    const seen = panel.fine.filter((band) => band.x1 > x.back(frame.left) && band.x0 < x.back(frame.right));
    const fine = seen.length && (frame.right - frame.left) / seen.length > 60;
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    (fine ? seen : panel.bands).forEach((band, k) => {
      const left = Math.max(x.at(band.x0), frame.left), right = Math.min(x.at(band.x1), frame.right);
      if (right <= left) return;
      pen.fillStyle = ink("faint");
      pen.globalAlpha = k % 2 ? 0.95 : 0.45;
      pen.fillRect(left, frame.top - 5, right - left, 3);
      pen.globalAlpha = 1;
      if (pen.measureText(band.label).width < right - left - 6) {
        pen.fillText(band.label, (left + right) / 2, frame.top - 9);
      }
    });
  }
}

function* chained(lists) {
  for (const list of lists) yield* list;
}

// No margin on a time axis.
function tight(scale, values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  scale.full = [scale.axis.from_zero ? Math.min(low, 0) : low, high];
  scale.reset();
}

function byColour(boxes) {
  const order = Uint32Array.from(boxes.x0, (_, k) => k);
  return order.sort((one, other) => boxes.colour[one] - boxes.colour[other] || one - other);
}

// What the legend shows a colour as: a ramp is one entry.
function group(colour) {
  return colour[3] ? "ramp" : colour[0];
}

function contrast(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14171c" : "#ffffff";
}
