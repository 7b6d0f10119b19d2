// What is under the pointer, as [title, [[what, text], ...]], or null.

const NEAR = 24; // pixels from a point at which it is meant

Object.assign(Chart.prototype, {
  under(px, py) {
    const { panel, frame } = this;
    if (!frame || px < frame.left || px > frame.right || py < frame.top || py > frame.bottom) return null;
    if (panel.boxes) return this.boxUnder(px, py);
    return panel.lines.some((line) => line.markers) ? this.pointNear(px, py) : this.valuesAt(px);
  },

  boxUnder(px, py) {
    const { boxes } = this.panel;
    const x0 = this.x.back(px - 1.5), x1 = this.x.back(px + 1.5);
    const ends = [this.y.back(py - 0.5), this.y.back(py + 0.5)];
    const y0 = Math.min(...ends), y1 = Math.max(...ends);
    const exact = this.x.back(px);
    let found = -1, off = Infinity;
    for (const k of this.order) {
      if (boxes.x1[k] < x0 || boxes.x0[k] > x1 || boxes.y1[k] < y0 || boxes.y0[k] > y1) continue;
      if (this.hidden.has(group(boxes.colours[boxes.colour[k]]))) continue;
      const away = Math.max(boxes.x0[k] - exact, exact - boxes.x1[k], 0);
      if (away <= off) [found, off] = [k, away];
    }
    return found < 0 ? null : facts(boxes.facts, found);
  },

  pointNear(px, py) {
    let found = null, near = NEAR;
    for (const line of this.panel.lines) {
      if (this.hidden.has(line.label)) continue;
      line.x.forEach((value, k) => {
        const away = Math.hypot(this.x.at(value) - px, this.y.at(line.y[k]) - py);
        if (away < near) [found, near] = [[line, k], away];
      });
    }
    if (!found) return null;
    const [line, k] = found;
    const { x, y } = this.panel;
    const own = [[x.label, told(x.unit, line.x[k])], [y.label, told(y.unit, line.y[k])]];
    const [title, rows] = facts(line.facts, k);
    const more = rows.filter(([, text]) => own.every(([, other]) => other !== text));
    return [title || line.label, [...own, ...more]];
  },

  valuesAt(px) {
    const value = this.x.back(px), { x, y, lines } = this.panel;
    const rows = lines.filter((line) => !this.hidden.has(line.label)).map((line) => {
      let low = 0, high = line.x.length; // the last point that is not beyond
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (line.x[middle] <= value) low = middle;
        else high = middle;
      }
      const next = line.x[low + 1];
      if (!line.steps && next !== undefined && next - value < value - line.x[low]) low += 1;
      return [line.label.split(":")[0], told(y.unit, line.y[low])];
    });
    return [`${x.label}: ${told(x.unit, value)}`, rows];
  },
});

function facts(all, k) {
  const rows = [];
  let title = "";
  for (const { label, values, unit, names } of all) {
    const text = unit === null ? names[values[k]] : told(unit, values[k]);
    if (!label) title = text;
    else if (values[k] || label !== "moves") rows.push([label, text]);
  }
  return [title, rows];
}
