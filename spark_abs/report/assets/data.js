/* The report: columns become rows, and rows become figures. */

/** Return a column of differences as numbers; null stays. */
function summed(column) {
  let before = 0;
  return column.map((step) => (step === null ? null : (before += step)));
}

/** Return rows from columns: `texts` names the columns whose numbers are places in the list of texts. */
function rowsOf(columns, textColumns, texts) {
  const names = Object.keys(columns);
  const values = names.map((name) => {
    const numbers = summed(columns[name]);
    return textColumns.has(name) ? numbers.map((place) => texts[place]) : numbers;
  });
  const count = names.length ? values[0].length : 0;
  return Array.from({ length: count }, (_, row) => {
    const found = {};
    names.forEach((name, column) => {
      found[name] = values[column][row];
    });
    return found;
  });
}

const TEXTS = new Set(
  "outcome kind name mode reason detail damage stage sink place source position".split(" "),
);

/** Return rows by the value of one column, in their order. */
function grouped(rows, name) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row[name])) {
      found.set(row[name], []);
    }
    found.get(row[name]).push(row);
  }
  return found;
}

/** Return the report with its columns as rows. */
function decoded(plain) {
  const rows = (columns) => rowsOf(columns, TEXTS, plain.texts);
  const checkpoints = rows(plain.checkpoints);
  const parts = rows(plain.parts);
  const cutRows = {
    stages: grouped(rows(plain.cut_stages), "cut"),
    sinks: grouped(rows(plain.cut_sinks), "cut"),
    sources: grouped(rows(plain.cut_sources), "cut"),
  };
  const cuts = new Map();
  plain.cuts.forEach((checkpoint, place) => {
    cuts.set(checkpoint, {
      checkpoint,
      stages: cutRows.stages.get(place) || [],
      sinks: cutRows.sinks.get(place) || [],
      sources: cutRows.sources.get(place) || [],
      outside: plain.outside[place],
    });
  });
  return {
    ...plain,
    checkpoints,
    byId: new Map(checkpoints.map((line) => [line.id, line])),
    parts: grouped(parts, "checkpoint"),
    partsOfStage: grouped(parts, "stage"),
    cuts,
  };
}

/** Return the figures of numbers: the percentiles are the smallest values with so many at or below them. */
function figures(values) {
  const sorted = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (!sorted.length) {
    return null;
  }
  const rank = (share) => sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
  return {
    count: sorted.length,
    min: sorted[0],
    avg: Math.round(sorted.reduce((sum, value) => sum + value, 0) / sorted.length),
    p50: rank(0.5),
    p95: rank(0.95),
    p99: rank(0.99),
    max: sorted[sorted.length - 1],
  };
}

/** Return the producer of a channel: its name is STAGE.OUTPUT. */
function producerOf(channel) {
  return channel.split(".")[0];
}

/** Return for each stage the stages that it reads from, without the ways back of loops. */
function upstreamOf(report) {
  const found = new Map(report.stages.map((stage) => [stage.name, []]));
  for (const edge of report.channels) {
    if (!edge.feedback && found.has(edge.stage)) {
      found.get(edge.stage).push(producerOf(edge.channel));
    }
  }
  return found;
}

/** Return for each stage its distance from the sources: the longest way. */
function depths(report) {
  const upstream = upstreamOf(report);
  const found = new Map();
  const visit = (stage, open) => {
    if (found.has(stage)) {
      return found.get(stage);
    }
    if (open.has(stage)) {
      return 0;
    }
    open.add(stage);
    const before = (upstream.get(stage) || []).map((other) => visit(other, open) + 1);
    open.delete(stage);
    found.set(stage, Math.max(0, ...before));
    return found.get(stage);
  };
  for (const stage of upstream.keys()) {
    visit(stage, new Set());
  }
  return found;
}

/** Return the parts of a checkpoint in the order of the graph, each with its own share of the time. */
function partsInOrder(report, id) {
  const depth = depths(report);
  const upstream = upstreamOf(report);
  const parts = (report.parts.get(id) || []).map((part) => ({ ...part }));
  const byStage = new Map(parts.map((part) => [part.stage, part]));
  const sent = (part) => Math.max(0, (part.duration_ms || 0) - (part.async_ms || 0) - (part.sync_ms || 0));
  for (const part of parts) {
    const before = (upstream.get(part.stage) || []).map((stage) => byStage.get(stage)).filter(Boolean);
    part.came_ms = Math.max(0, ...before.filter((other) => other.acked).map(sent));
    part.own_ms = Math.max(0, (part.duration_ms || 0) - part.came_ms);
    part.first = !part.acked && before.every((other) => other.acked);
  }
  markStragglers(parts);
  const place = (part) => (depth.has(part.stage) ? depth.get(part.stage) : 0);
  return parts.sort((a, b) => place(a) - place(b) || a.stage.localeCompare(b.stage));
}

/** Mark the stages that held a checkpoint up: their own time is a third of the whole, and unusual. */
function markStragglers(parts) {
  const waiting = parts.some((part) => !part.acked);
  const whole = Math.max(0, ...parts.map((part) => part.duration_ms || 0));
  const usual = figures(parts.map((part) => part.own_ms));
  for (const part of parts) {
    part.straggler = waiting
      ? part.first
      : parts.length > 1 && part.own_ms >= 100 && part.own_ms * 3 >= whole && part.own_ms >= 2 * usual.p50;
  }
}

/** Return the aborted checkpoints after the last completed one, oldest first. */
function abortedInARow(report) {
  const found = [];
  for (let place = report.checkpoints.length - 1; place >= 0; place -= 1) {
    const line = report.checkpoints[place];
    if (line.outcome === "completed" && !line.edited) {
      break;
    }
    if (line.outcome === "aborted") {
      found.unshift(line);
    }
  }
  return found;
}

/** Return the newest checkpoint for which something holds. */
function newest(report, holds) {
  for (let place = report.checkpoints.length - 1; place >= 0; place -= 1) {
    if (holds(report.checkpoints[place])) {
      return report.checkpoints[place];
    }
  }
  return null;
}
