// Numbers on axes and in hovers. Units are those of figure.py's Unit.

const SIZES = {
  bytes: [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]],
  seconds: [["s", 1], ["ms", 1e-3], ["µs", 1e-6]],
  share: [["%", 0.01]],
};

function unitFor(unit, value) {
  const table = SIZES[unit];
  return table ? table.find(([, size]) => Math.abs(value) >= size) || table.at(-1) : ["", 1];
}

function tokensText(value) {
  for (const [name, size] of [["M", 2 ** 20], ["K", 2 ** 10]]) {
    if (value >= size && value % size === 0) return value / size + name;
  }
  return Math.round(value).toLocaleString("en");
}

// A number for a hover: as exact as somebody may want it.
function told(unit, value) {
  if (unit === "tokens") return tokensText(value);
  if (unit === "count") return Math.round(value).toLocaleString("en");
  const [name, size] = unitFor(unit, value);
  const text = String(Number((value / size).toPrecision(4))) + (name === "%" ? name : name && " " + name);
  return unit === "bytes" && size > 1 ? `${text} (${Math.round(value).toLocaleString("en")} B)` : text;
}

// One direction of a panel: from numbers to pixels and back. `low` and `high` are what is seen, as
// logarithms on a logarithmic axis.
class Scale {
  constructor(axis, low, high) {
    this.axis = axis;
    this.full = [low, high];
    [this.low, this.high] = this.full;
    this.from = 0;
    this.to = 1;
  }

  static over(axis, values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) [low, high] = [0, 1];
    if (axis.log) [low, high] = [Math.log2(low), Math.log2(high)];
    const pad = (high - low || Math.abs(high) || 1) * 0.04;
    if (axis.lanes.length) return new Scale(axis, 0, axis.lanes.length);
    if (axis.from_zero && !axis.log) return new Scale(axis, Math.min(low, 0), high + pad);
    return new Scale(axis, low - pad, high + pad);
  }

  at(value) {
    const place = this.axis.log ? Math.log2(value) : value;
    return this.from + ((place - this.low) / (this.high - this.low)) * (this.to - this.from);
  }

  back(pixel) {
    const place = this.low + ((pixel - this.from) / (this.to - this.from)) * (this.high - this.low);
    return this.axis.log ? 2 ** place : place;
  }

  // `factor` below 1 comes nearer; what is at `pixel` stays there.
  zoom(factor, pixel) {
    const share = (pixel - this.from) / (this.to - this.from);
    const fixed = this.low + share * (this.high - this.low);
    const most = this.full[1] - this.full[0];
    const span = Math.min(Math.max((this.high - this.low) * factor, most * 1e-7), most);
    this.set(fixed - share * span, span);
  }

  // Moves what is seen, by a share of it.
  pan(share) {
    const span = this.high - this.low;
    this.set(this.low + share * span, span);
  }

  set(low, span) {
    this.low = Math.min(Math.max(low, this.full[0]), this.full[1] - span);
    this.high = this.low + span;
  }

  reset() {
    [this.low, this.high] = this.full;
  }

  get zoomed() {
    return this.low !== this.full[0] || this.high !== this.full[1];
  }

  // [unit's name, [[number, text], ...]], at most `most` of them.
  ticks(most) {
    const { log, unit } = this.axis;
    if (log && this.high - this.low >= 2) {
      const [name, size] = unitFor(unit, 2 ** Math.ceil(this.low));
      const step = Math.ceil((this.high - this.low) / most);
      const found = [];
      for (let k = Math.ceil(this.low); k <= this.high; k += step) {
        found.push([2 ** k, this.text(2 ** k, size, 0)]);
      }
      return [name, found];
    }
    const [low, high] = log ? [2 ** this.low, 2 ** this.high] : [this.low, this.high];
    const [name, size] = unitFor(unit, Math.max(Math.abs(low), Math.abs(high)));
    const raw = (high - low) / size / Math.max(most, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 5, 10].map((k) => k * power).find((one) => one >= raw * (1 - 1e-9));
    if (unit === "count") step = Math.max(step, 1);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let k = Math.ceil(low / size / step - 1e-9); k * step <= (high / size) * (1 + 1e-12); k++) {
      const value = k * step * size || 0; // no -0
      found.push([value, this.text(value, size, digits)]);
    }
    return [name, found];
  }

  text(value, size, digits) {
    if (this.axis.unit === "tokens") return tokensText(value);
    const options = { minimumFractionDigits: digits, maximumFractionDigits: Math.max(digits, 3) };
    return (value / size).toLocaleString("en", options);
  }

  label(name) {
    return name ? `${this.axis.label} (${name})` : this.axis.label;
  }
}
