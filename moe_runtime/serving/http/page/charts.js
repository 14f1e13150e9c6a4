// What the server measures, once a second: two gauges in view, and charts of two minutes.

const SAMPLES = 120;
const WIDTH = 320, HEIGHT = 130, LEFT = 44, TOP = 8, BOTTOM = 20;

const hitRate = d => {
  const hits = d("moe:expert_hits_total");
  const all = hits + d("moe:expert_late_hits_total") + d("moe:expert_misses_total");
  return all ? 100 * hits / all : NaN;
};
const CHARTS = [  // d is a counter's difference, n the values themselves
  {name: "Tokens", unit: "tokens/s", digits: 1, of: d => d("vllm:generation_tokens_total") / d.seconds},
  {name: "Prompt tokens", unit: "tokens/s", digits: 0, of: d => d("vllm:prompt_tokens_total") / d.seconds},
  {name: "Experts found in memory", unit: "%", digits: 1, of: hitRate, most: 100},
  {name: "Experts read from disk", unit: "MB/s", digits: 1,
    of: d => d("moe:expert_bytes_read_total") / d.seconds / 1e6},
  {name: "Time waiting for experts", unit: "%", digits: 1, most: 100,
    of: d => 100 * d("moe:expert_stall_seconds_total") / d.seconds},
  {name: "KV cache in use", unit: "%", digits: 1, most: 100, of: (d, n) => 100 * n["vllm:kv_cache_usage_perc"]},
  {name: "Requests answered now", unit: "", digits: 0, of: (d, n) => n["vllm:num_requests_running"]},
  {name: "Requests that wait", unit: "", digits: 0, of: (d, n) => n["vllm:num_requests_waiting"]},
];

export function numbers(text, model) {  // sums of a model's metrics, by name
  const found = {};
  const own = `model_name="${model.replace(/[\\"]/g, "\\$&")}"`;
  for (const line of text.split("\n")) {
    if (line.includes("model_name=") && !line.includes(own)) continue;
    if (line.includes('tier="host"')) continue;  // copies to a device are no reads
    const match = line.match(/^([a-zA-Z_:]+)(?:\{.*\})? (\S+)$/);
    if (match) found[match[1]] = (found[match[1]] || 0) + Number(match[2]);
  }
  return found;
}

const said = (chart, value) => Number.isFinite(value)
  ? value.toFixed(chart.digits) + (chart.unit === "%" ? " %" : chart.unit && " " + chart.unit) : "–";

export class Charts {
  constructor(box) {
    this.charts = CHARTS.map(chart => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const value = document.createElement("b");
      const svg = drawn("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"});
      caption.append(chart.name, value);
      figure.append(caption, svg);
      box.append(figure);
      return {...chart, value, svg, values: []};
    });
    this.begin();
  }

  begin() {  // of another model
    this.before = null;
    for (const chart of this.charts) chart.values = [];
  }

  take(now, seconds) {  // gives tokens a second and the hit rate as words
    if (this.before) {
      const difference = name => (now[name] || 0) - (this.before.now[name] || 0);
      difference.seconds = seconds - this.before.seconds;
      for (const chart of this.charts) {
        chart.values = [...chart.values, chart.of(difference, now)].slice(-SAMPLES);
      }
    }
    this.before = {now, seconds};
    const rate = this.charts[0].values.at(-1);
    const hits = this.charts[2].values.findLast(Number.isFinite);  // while none is asked for, the last one
    return [Number.isFinite(rate) ? rate.toFixed(1) : "–", said(CHARTS[2], hits)];
  }

  draw() {
    for (const chart of this.charts) draw(chart);
  }
}

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function roundUp(value) {  // to 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(one => one * power).find(one => one >= value * (1 - 1e-9));
}

function draw(chart) {
  const known = chart.values.filter(Number.isFinite);
  const most = chart.most || roundUp(Math.max(...known, 1));
  const x = at => LEFT + (WIDTH - LEFT - 8) * (at + SAMPLES - chart.values.length) / (SAMPLES - 1);
  const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(value / most, 1));
  const parts = [];
  for (const value of [0, most / 2, most]) {
    parts.push(drawn("line", {class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value)}));
    parts.push(drawn("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, `${value}`));
  }
  const times = [["−2 min", LEFT, "start"], ["−1 min", (LEFT + WIDTH - 8) / 2, "middle"],
    ["now", WIDTH - 8, "end"]];
  for (const [words, place, anchor] of times) {
    parts.push(drawn("text", {x: place, y: HEIGHT - 5, "text-anchor": anchor}, words));
  }
  let path = "", isDown = false;
  chart.values.forEach((value, at) => {
    if (Number.isFinite(value)) path += `${isDown ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    isDown = Number.isFinite(value);
  });
  if (path) parts.push(drawn("path", {class: "curve", d: path}));
  chart.svg.replaceChildren(...parts);
  const last = said(chart, chart.values.at(-1));
  chart.value.textContent = last;
  const range = known.length ? `, between ${said(chart, Math.min(...known))} and ${said(chart, Math.max(...known))}` : "";
  chart.svg.setAttribute("aria-label", `${chart.name}: ${last}${range} in the last two minutes`);
}
