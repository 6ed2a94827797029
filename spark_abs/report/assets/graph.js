/* The job as a graph in layers, with barriers, blocked channels and what has not been read. */

const NODE = { width: 188, height: 52, leaf: 34, across: 100, down: 16 };

/** Return the nodes of the graph: stages, and leaves for what they read and write outside of the job. */
function graphNodes(report) {
  const depth = depths(report);
  const nodes = [];
  const edges = [];
  for (const stage of report.stages) {
    const layer = depth.get(stage.name) + 1;
    nodes.push({ id: `stage ${stage.name}`, kind: "stage", label: stage.name, layer, stage });
    stage.sources.forEach((source, place) => {
      const id = `source ${stage.name} ${place}`;
      nodes.push({ id, kind: "source", label: source, layer: layer - 1 });
      edges.push({ from: id, to: `stage ${stage.name}` });
    });
    stage.sinks.forEach((sink) => {
      const id = `sink ${stage.name} ${sink.name}`;
      nodes.push({ id, kind: "sink", label: sink.name, layer: layer + 1, sink });
      edges.push({ from: `stage ${stage.name}`, to: id });
    });
  }
  for (const channel of report.channels) {
    const from = `stage ${producerOf(channel.channel)}`;
    edges.push({ from, to: `stage ${channel.stage}`, channel });
  }
  const known = new Set(nodes.map((node) => node.id));
  return { nodes, edges: edges.filter((edge) => known.has(edge.from) && known.has(edge.to)) };
}

/** Place the nodes: layers from left to right; in a layer near the nodes that they are joined with. */
function placed(graph) {
  const byId = new Map(graph.nodes.map((node) => [node.id, node]));
  const joined = new Map(graph.nodes.map((node) => [node.id, []]));
  for (const edge of graph.edges) {
    joined.get(edge.from).push(edge.to);
    joined.get(edge.to).push(edge.from);
  }
  const layers = [...grouped(graph.nodes, "layer").entries()].sort((a, b) => a[0] - b[0]).map(([, nodes]) => nodes);
  const heightOf = (node) => (node.kind === "stage" ? NODE.height : NODE.leaf);
  const lay = (nodes) => {
    const height = nodes.reduce((sum, node) => sum + heightOf(node) + NODE.down, -NODE.down);
    let y = -height / 2;
    for (const node of nodes) {
      node.y = y;
      node.middle = y + heightOf(node) / 2;
      y += heightOf(node) + NODE.down;
    }
  };
  layers.forEach(lay);
  for (let sweep = 0; sweep < 6; sweep += 1) {
    for (const nodes of sweep % 2 ? [...layers].reverse() : layers) {
      for (const node of nodes) {
        const others = joined.get(node.id).map((id) => byId.get(id).middle);
        node.wish = others.length ? others.reduce((sum, y) => sum + y, 0) / others.length : node.middle;
      }
      nodes.sort((a, b) => a.wish - b.wish || a.label.localeCompare(b.label));
      lay(nodes);
    }
  }
  const top = Math.min(...graph.nodes.map((node) => node.y));
  layers.forEach((nodes, layer) => {
    for (const node of nodes) {
      node.x = layer * (NODE.width + NODE.across);
      node.y -= top;
      node.height = heightOf(node);
      node.middle -= top;
    }
  });
  return {
    ...graph,
    byId,
    width: layers.length * (NODE.width + NODE.across) - NODE.across,
    height: Math.max(...graph.nodes.map((node) => node.y + node.height)),
  };
}

/** Return the open checkpoint that the graph shows: the oldest. */
function openCheckpoint(report) {
  return report.alive ? report.checkpoints.find((line) => line.outcome === "open") || null : null;
}

/** Return how far a stage is with the open checkpoint: passed, aligning or awaited. */
function barrierState(report, stage, open) {
  if (!open) {
    return "";
  }
  if ((stage.passed || 0) >= open.id) {
    return "passed";
  }
  const inputs = report.channels.filter((edge) => edge.stage === stage.name && !edge.feedback);
  return inputs.some((edge) => (edge.epoch || 0) >= open.id) ? "aligning" : "awaited";
}

/** Return what waits in the inputs of a stage. */
function behind(report, stage) {
  const inputs = report.channels.filter((edge) => edge.stage === stage && edge.entries !== null);
  if (!inputs.length) {
    return null;
  }
  const sum = (name) => inputs.reduce((total, edge) => total + edge[name], 0);
  return { entries: sum("entries"), rows: sum("rows"), size: sum("size"), more: inputs.some((edge) => edge.more) };
}

function behindText(found) {
  if (!found) {
    return "–";
  }
  const more = found.more ? "at least " : "";
  return found.entries ? `${more}${counted(found.rows, "row")}, ${bytes(found.size)}` : "nothing";
}

function edgeText(edge) {
  const name = `Channel ${edge.channel} to ${edge.stage}`;
  const parts = [];
  if (edge.entries) {
    parts.push(`${edge.more ? "at least " : ""}${counted(edge.rows, "row")} not read`);
  }
  if (edge.barrier) {
    parts.push(`barrier ${edge.barrier} not read`);
  }
  if (edge.blocked) {
    parts.push(`blocked at barrier ${edge.epoch}`);
  }
  return `${name}: ${parts.join(", ") || "all is read"}`;
}

function drawEdge(graph, edge) {
  const from = graph.byId.get(edge.from);
  const to = graph.byId.get(edge.to);
  const [x1, y1, x2, y2] = [from.x + NODE.width, from.middle, to.x, to.middle];
  const channel = edge.channel;
  const back = x2 <= x1;
  const bend = back ? 60 : Math.min(70, (x2 - x1) / 2);
  const line = back
    ? `M${x1},${y1} C${x1 + bend},${graph.height + 40} ${x2 - bend},${graph.height + 40} ${x2 - 4},${y2}`
    : `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2 - 4},${y2}`;
  const kind = `edge${channel ? " channel" : ""}${channel && channel.blocked ? " blocked" : ""}${back ? " back" : ""}`;
  const parts = [svg("path", { class: kind, d: line, "marker-end": "url(#arrow)" })];
  if (channel) {
    parts.push(svg("title", {}, edgeText(channel)));
    if (!back && channel.barrier) {
      parts.push(barrierSign((x1 + x2) / 2 - 10, (y1 + y2) / 2, channel.barrier));
    }
    if (!back && channel.blocked) {
      parts.push(barrierSign(x2 - 14, y2, null));
    }
    const lag = channel.blocked ? "blocked" : channel.rows ? `${short(count(channel.rows), 9)}${channel.more ? "+" : ""}` : "";
    if (!back && lag) {
      // Beside the middle, on the free side: edges meet at their ends.
      const [x, y] = [(x1 + x2) / 2 + (y2 < y1 ? -6 : 6), (y1 + y2) / 2 + (y2 < y1 ? 18 : -8)];
      parts.push(svg("text", { class: `lag${channel.blocked ? " blocked" : ""}`, x, y }, lag));
    }
  }
  return svg("g", {}, parts);
}

function barrierSign(x, y, id) {
  return svg(
    "g",
    { class: "barrier" },
    svg("rect", { x: x - 2, y: y - 11, width: 5, height: 22, rx: 1 }),
    id === null ? null : svg("text", { x, y: y - 15, "text-anchor": "middle" }, id),
  );
}

function drawNode(report, node, open) {
  const box = { x: node.x, y: node.y, width: NODE.width, height: node.height, rx: node.kind === "stage" ? 8 : node.height / 2 };
  if (node.kind !== "stage") {
    const label = node.kind === "source" ? node.label : `${node.sink.kind}: ${node.label}`;
    const shown = node.kind === "source" ? shortSource(node.label) : label;
    return svg(
      "g",
      { class: `node leaf ${node.kind}` },
      svg("title", {}, node.kind === "source" ? node.label : `${label} ${node.sink.place}`),
      svg("rect", box),
      svg("text", { x: node.x + NODE.width / 2, y: node.middle + 4, "text-anchor": "middle" }, short(shown, 24)),
    );
  }
  const stage = node.stage;
  const state = barrierState(report, stage, open);
  const batch = stage.planned === null ? "no batch yet" : `batch ${stage.planned}`;
  const said = state ? { passed: `▌${open.id} passed`, aligning: `▌${open.id} aligning`, awaited: `▌${open.id} awaited` }[state] : "";
  return svg(
    "a",
    { href: `#/stage=${encodeURIComponent(stage.name)}`, class: `node stage ${state}` },
    svg("rect", box),
    svg("rect", { class: "edge-mark", x: node.x, y: node.y + 6, width: 5, height: node.height - 12, rx: 2 }),
    svg("text", { class: "name", x: node.x + 14, y: node.y + 21 }, `${short(stage.name, 21)} `),
    svg("text", { class: "note", x: node.x + 14, y: node.y + 40 }, short([report.alive ? batch : "", said].filter(Boolean).join(" · ") || "not running", 26)),
  );
}

/** Return a source for a small box: its kind, and the end of its location. */
function shortSource(text) {
  const found = /^(\S+) source (.+)$/.exec(text);
  return found ? `${found[1]}: ${tail(found[2])}` : text;
}

/** Return the graph of a job. */
function graphOf(report) {
  if (!report.stages.length) {
    return el("p", { class: "empty" }, "No stage is recorded yet: the job records its stages at its first start.");
  }
  const open = openCheckpoint(report);
  const graph = placed(graphNodes(report));
  const loops = graph.edges.some((edge) => graph.byId.get(edge.to).x <= graph.byId.get(edge.from).x);
  const margin = 16;
  const [width, height] = [graph.width + 2 * margin, graph.height + 2 * margin + (loops ? 40 : 0)];
  const drawing = svg(
    "svg",
    {
      class: "graph",
      viewBox: `${-margin} ${-margin - 12} ${width} ${height + 12}`,
      width,
      height: height + 12,
      role: "group",
      "aria-label": "The job as a graph; the table of stages below has the same figures",
    },
    svg(
      "defs",
      {},
      svg(
        "marker",
        { id: "arrow", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        svg("path", { class: "head", d: "M0,0 L8,4 L0,8 z" }),
      ),
    ),
    graph.edges.map((edge) => drawEdge(graph, edge)),
    graph.nodes.map((node) => drawNode(report, node, open)),
  );
  return el(
    "div",
    {},
    scrolled("Graph of the job", drawing, { "data-key": "graph" }),
    el(
      "p",
      { class: "legend" },
      swatch("barrier", "barrier in a channel"),
      swatch("blocked", "blocked: waits for the barrier on another input"),
      el("span", {}, "numbers on channels: rows not read"),
    ),
  );
}
