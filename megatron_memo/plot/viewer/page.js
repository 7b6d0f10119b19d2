// Unpacks the figures of the page and puts them in their places; light and dark.

const HINT = "Drag to move. Click the figure, then wheel, + and − to zoom, arrows to move, 0 to see all.";
const dark = matchMedia("(prefers-color-scheme: dark)");
const redraws = [];

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
}

async function unpack(block) {
  const bytes = Uint8Array.from(atob(block.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function show(section) {
  const figure = await unpack(section.querySelector("script").textContent);
  const place = section.querySelector(".panels"), hidden = new Set();
  const zooming = figure.panels.some((panel) => panel.boxes || panel.bands.length);
  place.replaceChildren();
  if (figure.stacked || zooming) place.style.gridTemplateColumns = "minmax(0, 1fr)";
  const charts = figure.panels.map((panel) => {
    const canvas = element("canvas"), hover = element("div", "hover");
    const lanes = panel.y.lanes.length;
    const height = lanes ? `${Math.max(180, 70 + 34 * lanes)}px` : zooming ? "min(72vh, 40rem)" : "24rem";
    canvas.style.height = height;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", [figure.title, panel.title, ...figure.notes].join(". "));
    const chart = new Chart(panel, canvas, hover, hidden);
    const frame = element("div", "panel"), plot = element("div", "plot");
    plot.append(canvas, hover);
    frame.append(controls(chart), plot);
    place.append(frame);
    return chart;
  });
  place.after(element("div", "hint", HINT));
  const draw = () => charts.forEach((chart) => chart.later());
  const again = () => {
    legend(figure, section.querySelector(".legend"), hidden, draw);
    draw();
  };
  again();
  redraws.push(again);
}

function themeButton() {
  const button = document.getElementById("theme");
  const name = () => (button.textContent = isDark() ? "light" : "dark");
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
    redraws.forEach((again) => again());
  });
  dark.addEventListener("change", () => {
    name();
    redraws.forEach((again) => again());
  });
  name();
}

themeButton();
for (const section of document.querySelectorAll("section.figure")) {
  show(section).catch((error) => {
    section.querySelector(".panels").textContent = `This figure could not be drawn: ${error.message}`;
  });
}
