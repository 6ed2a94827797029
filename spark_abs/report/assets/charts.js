/* Drawings of checkpoints: over time, the stages of one, attempts. */

/** Return round steps from 0 to a number. */
function ticks(most, steps, bases) {
  const raw = most / steps;
  if (!(raw > 0)) {
    return [0];
  }
  const [base, scales] = bases;
  const unit = base ** Math.floor(Math.log(raw) / Math.log(base));
  const step = scales.map((scale) => scale * unit).find((size) => size >= raw) || base * unit;
  const found = [];
  for (let at = 0; at <= most * 1.0001; at += step) {
    found.push(at);
  }
  return found;
}

const DECIMAL = [10, [1, 2, 5, 10]];
const BINARY = [2, [1, 2]];

/**
 * Return a chart over time: of many checkpoints that share a place the greatest is drawn.
 * `series` is a list of {name, className, value}, drawn as lines; aborted ones are marked below.
 */
function timeChart(title, lines, series, format, bases) {
  const shown = lines.filter((line) => line.triggered_ms !== null && line.outcome !== "open");
  if (shown.length < 2) {
    return el("p", { class: "empty" }, "A chart needs two finished checkpoints.");
  }
  const box = { width: 1000, height: 220, left: 70, right: 16, top: 12, bottom: 34 };
  const first = shown[0].triggered_ms;
  const last = Math.max(...[shown[shown.length - 1].triggered_ms, first + 1]);
  const most = Math.max(1, ...series.map((one) => shown.reduce((top, line) => (line.outcome === "completed" ? Math.max(top, one.value(line) || 0) : top), 0)));
  const x = (ms) => box.left + ((ms - first) / (last - first)) * (box.width - box.left - box.right);
  const y = (value) => box.height - box.bottom - (value / most) * (box.height - box.top - box.bottom);
  const parts = ticks(most, 4, bases || DECIMAL).map((tick) =>
    svg(
      "g",
      { class: "tick" },
      svg("line", { x1: box.left, x2: box.width - box.right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
    ),
  );
  for (const one of series) {
    const columns = new Map();
    for (const line of shown) {
      const value = one.value(line);
      if (value !== null && value !== undefined && line.outcome === "completed") {
        const column = Math.round(x(line.triggered_ms));
        columns.set(column, Math.max(columns.get(column) || 0, value));
      }
    }
    const points = [...columns].sort((a, b) => a[0] - b[0]).map(([column, value]) => `${column},${y(value).toFixed(1)}`);
    if (points.length === 1) {
      const [cx, cy] = points[0].split(",");
      parts.push(svg("circle", { class: `dot ${one.className}`, cx, cy, r: 3 }));
    } else {
      parts.push(svg("polyline", { class: `line ${one.className}`, points: points.join(" ") }));
    }
  }
  const aborted = new Set(shown.filter((line) => line.outcome === "aborted").map((line) => Math.round(x(line.triggered_ms))));
  for (const column of aborted) {
    const bottom = box.height - box.bottom;
    parts.push(svg("path", { class: "cross", d: `M${column - 4},${bottom - 8} l8,8 m0,-8 l-8,8` }));
  }
  const at = (ms, anchor) => svg("text", { class: "axis", x: x(ms), y: box.height - 10, "text-anchor": anchor }, moment(ms).textContent);
  parts.push(at(first, "start"), at(last, "end"));
  const summary = series
    .map((one) => [one.name, figures(shown.filter((line) => line.outcome === "completed").map(one.value))])
    .filter(([, found]) => found)
    .map(([name, found]) => `${name}: median ${format(found.p50)}, greatest ${format(found.max)}`)
    .join("; ");
  return el(
    "figure",
    {},
    scrolled(
      title,
      svg(
        "svg",
        { class: "chart", viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": `${title}. ${summary}. ${counted(aborted.size, "place")} with aborted checkpoints` },
        parts,
      ),
    ),
    el(
      "figcaption",
      { class: "legend" },
      series.map((one) => swatch(one.className, one.name)),
      aborted.size ? el("span", {}, el("b", { class: "cross-text", "aria-hidden": "true" }, "✕"), " aborted") : null,
    ),
  );
}

const PHASES = [
  ["delay", "start delay: the barrier is on its way"],
  ["alignment", "alignment: inputs wait for each other"],
  ["batch", "batch: until its end"],
  ["sync", "sync: processing stands still"],
  ["copy", "copy: processing continues"],
];

/** Return the phases of a part as [name, from, to]. */
function phases(part) {
  const end = part.duration_ms || 0;
  const delay = Math.min(end, part.start_delay_ms || 0);
  const aligned = Math.min(end, delay + (part.alignment_ms || 0));
  if (!part.acked) {
    return [["delay", 0, delay], ["alignment", delay, aligned], ["waiting", aligned, end]];
  }
  const copy = Math.max(aligned, end - (part.async_ms || 0));
  const sync = Math.max(aligned, copy - (part.sync_ms || 0));
  return [
    ["delay", 0, delay],
    ["alignment", delay, aligned],
    ["batch", aligned, sync],
    ["sync", sync, copy],
    ["copy", copy, end],
  ].filter(([, from, to]) => to > from);
}

/** Return the stages of a checkpoint as bars from the trigger on. */
function gantt(parts) {
  const row = 26;
  const box = { width: 1100, left: 190, right: 190, top: 26 };
  const height = box.top + parts.length * row + 8;
  const most = Math.max(1, ...parts.map((part) => part.duration_ms || 0));
  const x = (ms) => box.left + (ms / most) * (box.width - box.left - box.right);
  const grid = ticks(most, 6, DECIMAL).map((tick) =>
    svg(
      "g",
      { class: "tick" },
      svg("line", { x1: x(tick), x2: x(tick), y1: box.top - 6, y2: height - 4 }),
      svg("text", { x: x(tick), y: box.top - 12, "text-anchor": "middle" }, duration(tick)),
    ),
  );
  const bars = parts.map((part, place) => {
    const y = box.top + place * row;
    const end = x(part.duration_ms || 0);
    return svg(
      "g",
      { class: part.straggler ? "row straggler" : "row" },
      svg("title", {}, partText(part)),
      svg("text", { class: "name", x: box.left - 8, y: y + 16, "text-anchor": "end" }, short(part.stage, 24)),
      phases(part).map(([name, from, to]) =>
        svg("rect", { class: `phase ${name}`, x: x(from), y: y + 4, width: Math.max(1, x(to) - x(from)), height: row - 10 }),
      ),
      part.acked ? svg("rect", { class: "ack", x: end - 1.5, y: y + 1, width: 3, height: row - 4 }) : null,
      svg(
        "text",
        { class: "end", x: end + 7, y: y + 16 },
        `${part.acked ? duration(part.duration_ms) : "no ack"}${part.straggler ? ` ◀ ${heldUp(part)}` : ""}`,
      ),
    );
  });
  return el(
    "figure",
    {},
    scrolled(
      "Stages from the trigger to their acknowledgements",
      svg(
        "svg",
        { class: "gantt", viewBox: `0 0 ${box.width} ${height}`, role: "img", "aria-label": "Stages of the checkpoint over time; the table below has the same figures" },
        grid,
        bars,
      ),
    ),
    el(
      "figcaption",
      { class: "legend" },
      PHASES.map(([name, text]) => swatch(name, text)),
      parts.every((part) => part.acked) ? null : swatch("waiting", "not acknowledged"),
    ),
  );
}

/** Return what a mark says of a stage that held a checkpoint up. */
function heldUp(part) {
  return part.acked ? "slowest" : "holds it up";
}

function partText(part) {
  return `${part.stage}: ${part.acked ? "acknowledged" : "waiting"} after ${duration(part.duration_ms)}, own time ${duration(part.own_ms)}`;
}

/** Return numbers as a small line, for a cell of a table. */
function sparkline(values, label) {
  const [width, height] = [120, 24];
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) {
    return "–";
  }
  const most = Math.max(1, ...known);
  const step = Math.max(1, Math.floor(known.length / width));
  const kept = known.filter((_, place) => place % step === 0 || place === known.length - 1);
  const points = kept.map((value, place) => `${((place / (kept.length - 1)) * width).toFixed(1)},${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`);
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    svg("polyline", { points: points.join(" ") }),
  );
}

/** Return the attempts with their first and last checkpoints, savepoints, and the places where others began. */
function attemptRows(report) {
  const byAttempt = grouped(report.checkpoints.filter((line) => line.outcome === "completed" && line.attempt), "attempt");
  const places = new Map();
  for (const attempt of report.attempts) {
    const mine = byAttempt.get(attempt.id) || [];
    const branches = report.attempts.filter((other) => other.parent === attempt.id).map((other) => other.base || other.checkpoint);
    const ends = mine.length ? [mine[0].id, mine[mine.length - 1].id] : [];
    const named = mine.filter((line) => line.name).slice(-12).map((line) => line.id);
    places.set(attempt.id, {
      attempt,
      mine,
      ids: [...new Set([...ends, ...named, ...branches])].filter((id) => id !== null).sort((a, b) => a - b),
      left: Math.min(...branches.map((id) => (id === null ? Infinity : id)), Infinity),
    });
  }
  return places;
}

/** Return the attempts as a graph: a lane each, from the checkpoint that was restored. */
function attemptGraph(report) {
  const rows = attemptRows(report);
  const ids = [...new Set([...rows.values()].flatMap((row) => [...row.ids, row.attempt.base || row.attempt.checkpoint]))]
    .filter((id) => id !== null && id !== undefined)
    .sort((a, b) => a - b);
  const column = new Map(ids.map((id, place) => [id, place]));
  const [lane, step, left] = [56, Math.max(46, Math.min(110, 860 / Math.max(1, ids.length))), 150];
  const x = (id) => left + column.get(id) * step;
  const attempts = [...report.attempts];
  const y = (id) => 30 + attempts.findIndex((attempt) => attempt.id === id) * lane;
  const width = left + Math.max(1, ids.length) * step + 60;
  const height = attempts.length * lane + 20;
  const drawn = attempts.map((attempt) => {
    const row = rows.get(attempt.id);
    const at = y(attempt.id);
    const branch = attempt.base || attempt.checkpoint;
    const from = branch !== null && column.has(branch) ? x(branch) : left - 20;
    const own = row.ids.filter((id) => row.mine.some((line) => line.id === id));
    const end = own.length ? x(own[own.length - 1]) : from + 24;
    const leaves = attempt.current && row.left !== Infinity && column.has(row.left) ? x(row.left) : null;
    const kind = attempt.current ? "current" : "abandoned";
    const begin = own.length ? Math.min(x(own[0]), end) : from + 24;
    return svg(
      "g",
      { class: `lane ${kind}` },
      svg("text", { class: "name", x: 12, y: at + 4 }, `attempt ${attempt.id}${attempt.current ? "" : " (left)"}`),
      attempt.parent !== null
        ? svg("path", { class: "branch", d: `M${from},${y(attempt.parent)} C${from},${at} ${from + 8},${at} ${Math.max(begin, from + 24)},${at}` })
        : null,
      leaves === null
        ? svg("line", { class: "trunk", x1: begin, x2: end, y1: at, y2: at })
        : [
            svg("line", { class: "trunk", x1: begin, x2: Math.min(leaves, end), y1: at, y2: at }),
            end > leaves ? svg("line", { class: "trunk left-behind", x1: leaves, x2: end, y1: at, y2: at }) : null,
          ],
      own.map((id) => {
        const line = report.byId.get(id);
        const shown = short(line.name ? `${id} ${line.name}` : `${id}`, Math.max(4, Math.floor(step / 6.4)));
        return svg(
          "a",
          { href: `#/checkpoint=${id}`, class: `commit${line.abandoned ? " abandoned" : ""}${line.name ? " savepoint" : ""}`, "aria-label": `${shown}: ${line.kind} ${id}${line.abandoned ? ", abandoned" : ""}` },
          svg("circle", { cx: x(id), cy: at, r: line.name ? 8 : 6 }),
          svg("text", { x: x(id), y: at - 14, "text-anchor": "middle" }, shown),
        );
      }),
    );
  });
  return el(
    "div",
    {},
    scrolled(
      "Graph of attempts",
      svg(
        "svg",
        { class: "attempts", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Attempts and their checkpoints; the table below has the same" },
        drawn,
      ),
    ),
    el(
      "p",
      { class: "legend" },
      swatch("current", "current path"),
      swatch("abandoned", "abandoned by a restore"),
      el("span", {}, "large dots: savepoints"),
    ),
  );
}
