/* The views: each is a function from the report, and what is chosen in the address, to elements. */

const PAGE = 50;

function cards(list) {
  return el(
    "dl",
    { class: "cards" },
    list.filter(Boolean).map(([name, value, note, kind]) =>
      el("div", { class: `card ${kind || ""}` }, el("dt", {}, name), el("dd", {}, el("span", { class: "big" }, value), note ? el("span", { class: "small" }, note) : null)),
    ),
  );
}

/** Return what an operator must know first, the worst first. */
function notices(report) {
  const found = [];
  if (!report.ready) {
    found.push(["bad", `The restore to checkpoint ${report.restored_from} is not finished: run it again before the job is started.`]);
  }
  const row = abortedInARow(report);
  if (row.length) {
    const last = row[row.length - 1];
    const why = `${last.reason}${last.detail ? `: ${last.detail}` : ""}`;
    found.push(["bad", row.length === 1 ? "The newest checkpoint was aborted: " : `The last ${row.length} checkpoints were aborted, the newest: `, checkpointLink(last), ` ${why}`]);
  }
  const run = report.runs[report.runs.length - 1];
  if (run && run.ended && run.ended.startsWith("failed")) {
    found.push(["bad", `Run ${run.id} ${run.ended}`]);
  } else if (run && run.ended && run.ended.startsWith("killed")) {
    found.push(["warn", `Run ${run.id} was ${run.ended}: start the job again.`]);
  }
  for (const problem of report.problems) {
    found.push(["bad", problem]);
  }
  return found.map(([kind, ...text]) => el("p", { class: `notice ${kind}` }, el("b", { "aria-hidden": "true" }, kind === "bad" ? "✕ " : "! "), text));
}

function openNotice(report) {
  const open = openCheckpoint(report);
  if (!open) {
    return null;
  }
  const awaited = report.stages.filter((stage) => barrierState(report, stage, open) !== "passed");
  const upstream = upstreamOf(report);
  const late = new Set(awaited.map((stage) => stage.name));
  const first = awaited.filter((stage) => !(upstream.get(stage.name) || []).some((other) => late.has(other)));
  const who = first.length
    ? ["the barrier has not passed ", first.slice(0, 5).map((stage, place) => [place ? ", " : "", el("a", { href: `#/stage=${encodeURIComponent(stage.name)}` }, stage.name)]), first.length > 5 ? ` and ${first.length - 5} more` : "", awaited.length > first.length ? `, which ${counted(awaited.length - first.length, "later stage wait", "later stages wait")} for` : ""]
    : ["its barrier has passed every stage; their state is being copied"];
  return el("p", { class: "notice open" }, el("b", { "aria-hidden": "true" }, "… "), "Open: checkpoint ", checkpointLink(open), ", triggered ", moment(open.triggered_ms), `, for ${duration(Math.max(0, report.made_ms - open.triggered_ms))}: `, who, ".");
}

const MEASURES = [
  ["Duration", (line) => line.duration_ms, duration],
  ["State of the checkpoint", (line) => line.size_full, bytes],
  ["Newly written", (line) => line.size_new, bytes],
  ["Queued during alignment", (line) => line.alignment_bytes, bytes],
  ["Rows in flight", (line) => line.inflight_bytes, bytes],
];

/** Return the figures of completed checkpoints as a table. */
function figuresTable(lines) {
  const rows = MEASURES.map(([name, value, format]) => ({ name, format, found: figures(lines.map(value)) })).filter((row) => row.found);
  const column = (name) => [name, (row) => row.format(row.found[name]), true];
  return table(
    `Figures of ${counted(lines.length, "completed checkpoint")}`,
    [["Of completed checkpoints", (row) => row.name], ...["min", "avg", "p50", "p95", "p99", "max"].map(column)],
    rows,
    "No completed checkpoint is recorded.",
  );
}

function overview(report) {
  const lines = report.checkpoints;
  const of = (outcome) => lines.filter((line) => line.outcome === outcome);
  const completed = of("completed");
  const finished = completed.length + of("aborted").length;
  const latest = newest(report, (line) => line.outcome === "completed" && !line.edited);
  const failed = newest(report, (line) => line.outcome === "aborted");
  const savepoint = newest(report, (line) => line.outcome === "completed" && line.kind !== "checkpoint");
  const restore = [...report.events].reverse().find((event) => event.event === "restored");
  const more = report.earlier ? `and ${count(report.earlier)} earlier ids` : "";
  return [
    notices(report),
    openNotice(report),
    cards([
      ["Checkpoints", count(lines.length), more || `${count(lines.filter((line) => line.stored).length)} stored`],
      ["Completed", count(completed.length), finished ? `${((100 * completed.length) / finished).toFixed(1)} % of the finished` : "none has finished"],
      ["Aborted", count(of("aborted").length), failed ? ["newest: ", checkpointLink(failed), ` ${failed.reason}`] : "none", failed ? "warn" : ""],
      ["Open", count(of("open").length), ""],
      skippedCard(report.skips),
      ["Newest completed", latest ? checkpointLink(latest) : "none", latest ? [duration(latest.duration_ms), " · ", bytes(latest.size_full), el("br"), moment(latest.triggered_ms)] : ""],
      ["Newest savepoint", savepoint ? checkpointLink(savepoint) : "none", savepoint ? moment(savepoint.triggered_ms) : ""],
      ["Last restore", restore ? [el("a", { href: `#/checkpoint=${restore.checkpoint}` }, `to ${restore.checkpoint}`)] : "none", restore ? moment(restore.at_ms) : ""],
    ]),
    section("Job", graphOf(report)),
    section("Stages", stagesTable(report)),
    section("Figures", figuresTable(completed)),
    section("Duration of checkpoints", timeChart("Duration of checkpoints over time", lines, [{ name: "duration", className: "one", value: (line) => line.duration_ms }], duration)),
  ];
}

/** Return the card of the skipped checkpoints of the newest run, null if there are none. */
function skippedCard(skips) {
  if (!skips || !skips.in_run) {
    return null;
  }
  const row = skips.number ? [el("br"), `${count(skips.number)} in a row, until `, moment(skips.at_ms)] : "";
  return ["Skipped", count(skips.in_run), ["in the newest run", row]];
}

function stagesTable(report) {
  const open = openCheckpoint(report);
  const last = newest(report, (line) => report.parts.has(line.id));
  const parts = new Map((last ? partsInOrder(report, last.id) : []).map((part) => [part.stage, part]));
  const depth = depths(report);
  const stages = [...report.stages].sort((a, b) => depth.get(a.name) - depth.get(b.name) || a.name.localeCompare(b.name));
  const part = (stage, name) => (parts.has(stage.name) ? parts.get(stage.name)[name] : null);
  const columns = [
    ["Stage", (stage) => el("a", { href: `#/stage=${encodeURIComponent(stage.name)}` }, stage.name)],
    ["Finished batch", (stage) => count(stage.finished), true],
    ["Begun", (stage) => (stage.planned === stage.finished ? "–" : count(stage.planned)), true],
    ["Not read", (stage) => behindText(behind(report, stage.name)), true],
    open ? [`Barrier ${open.id}`, (stage) => barrierState(report, stage, open)] : null,
    last ? [`In ${last.id}`, (stage) => duration(part(stage, "duration_ms")), true] : null,
    last ? ["Own time", (stage) => [duration(part(stage, "own_ms")), part(stage, "straggler") ? el("span", { class: "mark straggler" }, ` ◀ ${heldUp(parts.get(stage.name))}`) : null], true] : null,
    last ? ["State", (stage) => bytes(part(stage, "size_full")), true] : null,
    ["Writes", (stage) => stage.sinks.map((sink) => `${sink.name} (${sink.kind})`).join(", ") || "–"],
  ].filter(Boolean);
  return table("Stages", columns, stages, "No stage is recorded yet.");
}

/* ---- history ---- */

function field(label, control) {
  return el("label", {}, el("span", {}, label), control);
}

function choice(key, options, chosen, onchange) {
  return el(
    "select",
    { "data-key": key, onchange: (event) => onchange(event.target.value) },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)),
  );
}

function filtered(report, filter) {
  const text = filter.text.trim().toLowerCase();
  const least = Number(filter.least) * 1000;
  const found = report.checkpoints.filter(
    (line) =>
      (!filter.outcome || (filter.outcome === "stored" ? line.stored : filter.outcome === "abandoned" ? line.abandoned : line.outcome === filter.outcome)) &&
      (!filter.kind || (filter.kind === "checkpoint") === (line.kind === "checkpoint")) &&
      (!filter.attempt || String(line.attempt) === filter.attempt) &&
      (!least || (line.duration_ms || 0) >= least) &&
      (!text || `${line.id} ${line.name} ${line.reason} ${line.detail} ${line.mode}`.toLowerCase().includes(text)),
  );
  const by = { longest: (line) => line.duration_ms || 0, largest: (line) => line.size_full || 0 }[filter.order];
  return by ? [...found].sort((a, b) => by(b) - by(a)) : found.reverse();
}

const HISTORY = [
  ["Id", (line) => checkpointLink(line)],
  ["Outcome", outcomeMark],
  ["Kind", (line) => line.kind.replace("_", " ") + (line.mode && line.mode !== "aligned" ? `, ${line.mode.replace(/_/g, " ")}` : "")],
  ["Triggered", (line) => moment(line.triggered_ms)],
  ["Duration", (line) => duration(line.duration_ms), true],
  ["State", (line) => bytes(line.size_full), true],
  ["New", (line) => bytes(line.size_new), true],
  ["Alignment", (line) => bytes(line.alignment_bytes), true],
  ["Acks", (line) => (line.stages ? `${line.acks === undefined ? "–" : count(line.acks)} of ${count(line.stages)}` : "–"), true],
  ["Attempt", (line) => count(line.attempt), true],
  ["Why", (line) => short([line.reason, line.detail || line.damage].filter(Boolean).join(": "), 160)],
];

function historyView(report, chosen, ui) {
  const filter = ui.filter;
  const change = (name) => (value) => {
    filter[name] = value;
    filter.page = 0;
    ui.draw();
  };
  const lines = filtered(report, filter);
  const pages = Math.max(1, Math.ceil(lines.length / PAGE));
  filter.page = Math.min(filter.page, pages - 1);
  const shown = lines.slice(filter.page * PAGE, (filter.page + 1) * PAGE);
  const turn = (key, text, page) =>
    el("button", { type: "button", "data-key": key, disabled: page < 0 || page >= pages, onclick: () => { filter.page = page; ui.draw(); } }, text);
  const attempts = report.attempts.map((attempt) => [attempt.id, `attempt ${attempt.id}`]);
  const input = (name, attributes) => el("input", { "data-key": name, value: filter[name], onchange: (event) => change(name)(event.target.value), ...attributes });
  const byTime = filter.order ? [...lines].sort((a, b) => a.id - b.id) : [...lines].reverse();
  return [
    section(
      "History",
      el(
        "form",
        { class: "filters", onsubmit: (event) => event.preventDefault() },
        field("Outcome", choice("outcome", [["", "all"], ["completed", "completed"], ["aborted", "aborted"], ["open", "open"], ["stored", "stored"], ["abandoned", "abandoned"]], filter.outcome, change("outcome"))),
        field("Kind", choice("kind", [["", "all"], ["checkpoint", "checkpoints"], ["savepoint", "savepoints"]], filter.kind, change("kind"))),
        attempts.length > 1 ? field("Attempt", choice("attempt", [["", "all"], ...attempts], filter.attempt, change("attempt"))) : null,
        field("Order", choice("order", [["", "newest"], ["longest", "longest"], ["largest", "largest"]], filter.order, change("order"))),
        field("At least, seconds", input("least", { type: "number", min: 0, step: "any", inputmode: "decimal" })),
        field("With the text", input("text", { type: "search", maxlength: 100 })),
      ),
      el("p", { role: "status", class: "small" }, `${counted(lines.length, "checkpoint")}${report.earlier ? `; ${count(report.earlier)} earlier ids are not in this page: spark-abs history has them` : ""}`),
    ),
    figuresTable(lines.filter((line) => line.outcome === "completed")),
    timeChart("Duration of these checkpoints over time", byTime, [{ name: "duration", className: "one", value: (line) => line.duration_ms }], duration),
    table("Checkpoints", HISTORY, shown.map((line) => Object.assign(line, { rowClass: line.abandoned ? "faded" : null })), "No checkpoint is like this."),
    el(
      "nav",
      { class: "pages", "aria-label": "Pages of the table" },
      turn("first", "« First", filter.page ? 0 : -1),
      turn("back", "‹ Back", filter.page - 1),
      el("span", {}, `page ${count(filter.page + 1)} of ${count(pages)}`),
      turn("next", "Next ›", filter.page + 1),
      turn("last", "Last »", filter.page === pages - 1 ? pages : pages - 1),
    ),
  ];
}

/* ---- one checkpoint, one stage ---- */

function checkpointView(report, chosen, ui) {
  const lines = report.checkpoints;
  if (!lines.length) {
    return section("Checkpoint", el("p", { class: "empty" }, "No checkpoint was triggered yet."));
  }
  const asked = Number(chosen);
  const line = chosen ? report.byId.get(asked) : newest(report, (one) => report.parts.has(one.id)) || lines[lines.length - 1];
  const place = line ? lines.indexOf(line) : -1;
  const step = (key, text, other) => el("button", { type: "button", "data-key": key, disabled: !other, onclick: () => ui.go(`checkpoint=${other.id}`) }, text);
  const picker = el(
    "form",
    { class: "filters", onsubmit: (event) => { event.preventDefault(); ui.go(`checkpoint=${event.target.elements.id.value}`); } },
    field("Checkpoint", el("input", { name: "id", type: "number", min: 1, "data-key": "id", value: line ? line.id : asked || "" })),
    el("button", { type: "submit", "data-key": "show" }, "Show"),
    step("older", "‹ Older", line ? lines[place - 1] : null),
    step("newer", "Newer ›", line ? lines[place + 1] : null),
  );
  if (!line) {
    return section("Checkpoint", picker, el("p", { class: "empty" }, `Checkpoint ${chosen} is not in this page.`));
  }
  const parts = partsInOrder(report, line.id);
  const slow = parts.filter((part) => part.straggler);
  return [
    section(
      `${line.kind === "checkpoint" || !line.kind ? "Checkpoint" : "Savepoint"} ${line.id}${line.name ? ` ${line.name}` : ""}`,
      picker,
      pairs([
        ["Outcome", outcomeMark(line)],
        line.reason ? ["Reason", line.reason] : null,
        line.detail ? ["Detail", line.detail] : null,
        line.damage ? ["Damage", line.damage] : null,
        ["Triggered", moment(line.triggered_ms)],
        ["Duration", duration(line.outcome === "open" ? report.made_ms - line.triggered_ms : line.duration_ms)],
        ["Mode", line.mode ? `${line.mode.replace(/_/g, " ")}${line.overtaken ? ", began aligned" : ""}` : "–"],
        ["State", `${bytes(line.size_full)}, of it new ${bytes(line.size_new)}`],
        ["Queued during alignment", bytes(line.alignment_bytes)],
        ["In flight", bytes(line.inflight_bytes)],
        ["Dropped late", line.dropped_late === null || line.dropped_late === undefined ? "–" : counted(line.dropped_late, "row")],
        ["Acknowledged", line.stages ? `${count(line.acks || 0)} of ${count(line.stages)} stages` : "–"],
        ["Run", `${count(line.run)}, attempt ${count(line.attempt)}`],
      ]),
      line.stored ? el("p", {}, el("a", { href: `#/undo=${line.id}` }, "What a restore to here would undo"), " · ", el("a", { href: `#/compare=${line.id}` }, "Compare with another")) : null,
    ),
    section(
      "Stages over time",
      slow.length ? el("p", { class: "notice warn" }, el("b", { "aria-hidden": "true" }, "! "), slow.length === 1 ? "The stage that held it up: " : "The stages that held it up: ", slow.map((part, at) => [at ? ", " : "", el("b", {}, part.stage), part.detail ? ` (${part.detail})` : ` (${duration(part.own_ms)} by itself)`]), ".") : null,
      parts.length ? gantt(parts) : el("p", { class: "empty" }, line.outcome === "open" ? "Stages are recorded when the checkpoint has ended." : "Its stages are not in this page: it has those of the newest checkpoints, and of aborted ones."),
    ),
    parts.length ? partsTable(parts) : null,
  ];
}

function partsTable(parts) {
  const ms = (title, name) => [title, (part) => duration(part[name]), true];
  const size = (title, name) => [title, (part) => bytes(part[name]), true];
  const columns = [
    ["Stage", (part) => el("a", { href: `#/stage=${encodeURIComponent(part.stage)}` }, part.stage)],
    ["Acknowledged", (part) => (part.acked ? el("span", { class: "mark completed" }, "✓ yes") : el("span", { class: "mark aborted" }, "✕ no"))],
    ms("Total", "duration_ms"),
    ms("Own time", "own_ms"),
    ms("Start delay", "start_delay_ms"),
    ms("Alignment", "alignment_ms"),
    ms("Sync", "sync_ms"),
    ms("Copy", "async_ms"),
    ms("Backpressured", "backpressured_ms"),
    size("Queued", "alignment_bytes"),
    size("In flight", "inflight_bytes"),
    size("State", "size_full"),
    size("New", "size_new"),
    ["Remark", (part) => [part.straggler ? `◀ ${heldUp(part)} ` : "", short(part.detail, 160)]],
  ];
  return table("Stages of the checkpoint", columns, parts.map((part) => ({ ...part, rowClass: part.straggler ? "strong" : null })));
}

function stageView(report, chosen, ui) {
  const stage = report.stages.find((one) => one.name === chosen) || (chosen ? null : report.stages[0]);
  const parts = report.partsOfStage.get(stage ? stage.name : chosen) || [];
  if (!stage && !parts.length) {
    return section("Stage", el("p", { class: "empty" }, "There is no such stage."));
  }
  const name = stage ? stage.name : chosen;
  const acked = parts.filter((part) => part.acked);
  const rows = [
    ["Total", "duration_ms", duration],
    ["Start delay", "start_delay_ms", duration],
    ["Alignment", "alignment_ms", duration],
    ["Copy", "async_ms", duration],
    ["State", "size_full", bytes],
    ["New", "size_new", bytes],
  ].map(([title, column, format]) => ({ title, format, found: figures(acked.map((part) => part[column])) })).filter((row) => row.found);
  const inputs = report.channels.filter((edge) => edge.stage === name);
  const outputs = report.channels.filter((edge) => producerOf(edge.channel) === name);
  return [
    section(
      `Stage ${name}`,
      report.stages.length > 1 ? el("form", { class: "filters" }, field("Stage", choice("stage", report.stages.map((one) => [one.name, one.name]), name, (value) => ui.go(`stage=${encodeURIComponent(value)}`)))) : null,
      stage
        ? pairs([
            ["Batch", `${count(stage.finished)} finished${stage.planned !== stage.finished ? `, ${count(stage.planned)} begun` : ""}`],
            stage.output_mode ? ["Output mode", stage.output_mode] : null,
            ...stage.sources.map((source) => ["Source", source]),
            ...stage.lookups.map((lookup) => ["Looks up", lookup]),
            ...stage.operators.map((operator) => ["State of", short(operator, 400)]),
            ...stage.sinks.map((sink) => ["Sink", `${sink.name}: ${sink.kind} ${sink.place}${sink.options.length ? ` (${sink.options.join("; ")})` : ""}`]),
          ])
        : el("p", { class: "empty" }, "The newest run has no such stage."),
    ),
    section("Inputs", table("Channels to the stage", channelColumns("From", (edge) => stageLink(producerOf(edge.channel))), inputs, "It reads no channel.")),
    section("Outputs", table("Channels from the stage", channelColumns("To", (edge) => stageLink(edge.stage)), outputs, "No stage reads from it.")),
    section("Its part in checkpoints", table("Figures of the stage", [["Of its acknowledgements in this page", (row) => row.title], ...["min", "avg", "p50", "p95", "p99", "max"].map((column) => [column, (row) => row.format(row.found[column]), true])], rows, "No acknowledgement of it is in this page.")),
    acked.length > 1 ? timeChart("State of the stage over time", acked.map((part) => ({ ...report.byId.get(part.checkpoint), outcome: "completed", state: part.size_full })), [{ name: "state", className: "one", value: (line) => line.state }], bytes, BINARY) : null,
  ];
}

function stageLink(name) {
  return el("a", { href: `#/stage=${encodeURIComponent(name)}` }, name);
}

function channelColumns(title, who) {
  return [
    ["Channel", (edge) => edge.channel],
    [title, who],
    ["Entry read", (edge) => count(edge.at), true],
    ["Entries not read", (edge) => `${edge.more ? "≥ " : ""}${count(edge.entries)}`, true],
    ["Rows", (edge) => count(edge.rows), true],
    ["Bytes", (edge) => bytes(edge.size), true],
    ["Barrier read", (edge) => count(edge.epoch), true],
    ["Barrier waiting", (edge) => count(edge.barrier), true],
    ["Remark", (edge) => (edge.blocked ? el("span", { class: "mark aborted" }, "blocked") : edge.feedback ? "feedback" : "")],
  ];
}

/* ---- sizes ---- */

function sizesView(report) {
  const stages = [...report.partsOfStage].map(([name, parts]) => {
    const acked = parts.filter((part) => part.acked && part.size_full !== null && part.size_full !== undefined);
    const first = acked[0] || {};
    const last = acked[acked.length - 1] || {};
    return { name, acked, size: last.size_full, fresh: last.size_new, growth: (last.size_full || 0) - (first.size_full || 0) };
  }).filter((row) => row.acked.length).sort((a, b) => (b.size || 0) - (a.size || 0));
  const total = stages.reduce((sum, row) => sum + (row.size || 0), 0);
  return [
    section(
      "State over time",
      timeChart("State of checkpoints over time", report.checkpoints, [
        { name: "state that a restore reads", className: "one", value: (line) => line.size_full },
        { name: "newly written", className: "two", value: (line) => line.size_new },
      ], bytes, BINARY),
    ),
    section(
      "State by stage",
      table(
        "State by stage, the largest first",
        [
          ["Stage", (row) => stageLink(row.name)],
          ["State", (row) => bytes(row.size), true],
          ["Share", (row) => (total ? `${((100 * row.size) / total).toFixed(1)} %` : "–"), true],
          ["Growth in this page", (row) => `${row.growth > 0 ? "+" : ""}${bytes(row.growth)}`, true],
          ["New in the last", (row) => bytes(row.fresh), true],
          ["Over time", (row) => sparkline(row.acked.map((part) => part.size_full), `State of ${row.name} over time`)],
        ],
        stages,
        "No acknowledgement with a size is in this page.",
      ),
    ),
    section("Figures", figuresTable(report.checkpoints.filter((line) => line.outcome === "completed"))),
  ];
}

/* ---- attempts, runs, events ---- */

function attemptsView(report) {
  const done = grouped(report.checkpoints.filter((line) => line.outcome === "completed"), "attempt");
  return [
    section("Attempts", attemptGraph(report), table(
      "Attempts",
      [
        ["Attempt", (attempt) => attempt.id],
        ["Began", (attempt) => moment(attempt.created_ms)],
        ["From", (attempt) => (attempt.parent === null ? "the beginning" : ["checkpoint ", el("a", { href: `#/checkpoint=${attempt.checkpoint}` }, attempt.checkpoint), attempt.base ? ` (an edit of ${attempt.base})` : "", ` of attempt ${attempt.parent}`])],
        ["Completed", (attempt) => count((done.get(attempt.id) || []).length), true],
        ["Abandoned", (attempt) => count((done.get(attempt.id) || []).filter((line) => line.abandoned).length), true],
        ["Path", (attempt) => `${attempt.current ? "on the current path" : "left by a restore"}${attempt.ready ? "" : ", its restore is not finished"}`],
      ],
      [...report.attempts].reverse(),
    )),
    section("Runs", table(
      "Runs, the newest first",
      [
        ["Run", (run) => run.id],
        ["Kind", (run) => run.kind],
        ["Attempt", (run) => run.attempt, true],
        ["Began", (run) => moment(run.started_ms)],
        ["Process", (run) => run.place],
        ["End", (run) => (run.ended === null ? el("span", { class: "mark completed" }, "at work") : short(run.ended, 300))],
      ],
      [...report.runs].reverse(),
      "No run has begun yet.",
    )),
    section("Events", table(
      "Events of runs, restores, restarts and settings, the newest first",
      [
        ["Time", (event) => moment(event.at_ms)],
        ["Event", (event) => event.event],
        ["Run", (event) => count(event.run), true],
        ["Checkpoint", (event) => (event.checkpoint === null ? "–" : el("a", { href: `#/checkpoint=${event.checkpoint}` }, event.checkpoint)), true],
        ["Stage", (event) => event.stage || "–"],
        ["What", (event) => short(event.text, 300)],
      ],
      [...report.events].reverse(),
      "No event is recorded.",
    )),
  ];
}

/* ---- restore, difference ---- */

function cutChoice(report, key, chosen, onchange) {
  const options = [...report.cuts.keys()].reverse().map((id) => {
    const line = report.byId.get(id) || { kind: "", name: "" };
    return [id, `${id}${line.name ? ` ${line.name}` : ""}${line.abandoned ? " (abandoned)" : line.edited ? " (edited)" : ""}`];
  });
  return choice(key, options, chosen, onchange);
}

function newestCut(report) {
  const onPath = newest(report, (line) => report.cuts.has(line.id) && !line.abandoned && !line.edited);
  return onPath ? report.cuts.get(onPath.id) : null;
}

/** Return pairs of rows with one key, of two cuts; a row that is missing is null. */
function paired(before, after, key) {
  const rows = new Map(before.map((row) => [key(row), { key: key(row), before: row, after: null }]));
  for (const row of after) {
    const known = rows.get(key(row)) || { key: key(row), before: null };
    rows.set(key(row), { ...known, after: row });
  }
  return [...rows.values()];
}

function undoneText(pair) {
  const { before, after } = pair;
  const kind = (before || after).kind;
  if (kind === "function") {
    return "stays: a restore does not undo the effects of a function";
  }
  if (!before) {
    return "the job came to it later: the plan of the restore says what becomes of it";
  }
  if (!after) {
    return "the job has left it since: the plan of the restore says what becomes of it";
  }
  const versions = after.version - before.version;
  return versions > 0 ? `${counted(versions, "version")} undone` : "nothing to undo";
}

const NO_CUT = "No stored checkpoint can be read: there is nothing to go back to.";

function undoView(report, chosen, ui) {
  const latest = newestCut(report);
  const before = [...report.cuts.keys()].filter((id) => latest && id < latest.checkpoint);
  const cut = chosen ? report.cuts.get(Number(chosen)) : report.cuts.get(before[before.length - 1]) || latest;
  if (!report.cuts.size || !latest) {
    return section("What a restore would undo", el("p", { class: "empty" }, NO_CUT));
  }
  const picker = el("form", { class: "filters" }, field("Restore to", cutChoice(report, "undo", cut ? cut.checkpoint : "", (value) => ui.go(`undo=${value}`))));
  if (!cut) {
    return section("What a restore would undo", picker, el("p", { class: "empty" }, `The positions of checkpoint ${chosen} are not in this page: the command shows its plan.`), command(`spark-abs restore ${quoted(report.root)} --to ${Number(chosen) || "ID"} --dry-run`));
  }
  const line = report.byId.get(cut.checkpoint) || {};
  const sinks = paired(cut.sinks, latest.sinks, (row) => `${row.stage}/${row.sink}`).sort((a, b) => a.key.localeCompare(b.key));
  const sources = paired(cut.sources, latest.sources, (row) => `${row.stage}/${row.source}`).filter((pair) => !pair.before || !pair.after || pair.before.position !== pair.after.position);
  const stages = paired(cut.stages, latest.stages, (row) => row.stage);
  const outside = report.stages.flatMap((stage) => stage.sinks.map((sink) => ({ ...sink, stage: stage.name }))).filter((sink) => !["delta", "function", "table"].includes(sink.kind));
  const later = latest.checkpoint - cut.checkpoint;
  return [
    section(
      `What a restore to ${cut.checkpoint}${line.name ? ` ${line.name}` : ""} would undo`,
      picker,
      el("p", { class: "notice open" }, later > 0 ? ["The job would be as of ", moment(line.triggered_ms), `, ${duration(Math.max(0, report.made_ms - (line.triggered_ms || 0)))} ago. Compared with checkpoint ${latest.checkpoint}, the newest whose positions are here; what came after that is undone, too.`] : "This is the newest checkpoint: only what came after it is undone."),
      line.damage ? el("p", { class: "notice bad" }, `It is damaged: ${line.damage}`) : null,
      el("p", {}, "The exact plan, which changes nothing:"),
      command(`spark-abs restore ${quoted(report.root)} --to ${cut.checkpoint} --dry-run`),
    ),
    section("Sinks", table(
      "Tables and functions",
      [
        ["Sink", (pair) => pair.key],
        ["Kind", (pair) => (pair.before || pair.after).kind],
        ["Then", (pair) => (pair.before ? count(pair.before.version) : "–"), true],
        ["Newest", (pair) => (pair.after ? count(pair.after.version) : "–"), true],
        ["A restore", undoneText],
        ["Where", (pair) => (pair.before || pair.after).place],
      ],
      sinks,
      "No sink is recorded in these checkpoints.",
    ), outside.length ? el("p", { class: "small" }, `Outside: ${outside.map((sink) => `${sink.stage}/${sink.name} (${sink.kind})`).join(", ")}. A restore that such a sink cannot follow is refused; the plan says it.`) : null),
    section("Input that is read again", table(
      "Sources",
      [
        ["Source", (pair) => pair.key],
        ["From", (pair) => (pair.before ? pair.before.position : "its start")],
        ["To", (pair) => (pair.after ? pair.after.position : "–")],
      ],
      sources,
      "No source has moved between the two.",
    )),
    section("Batches that are run again", table(
      "Stages",
      [
        ["Stage", (pair) => pair.key],
        ["Back to batch", (pair) => (pair.before ? (pair.before.batch < 0 ? "the beginning" : count(pair.before.batch)) : "no state: it is newer"), true],
        ["Newest", (pair) => (pair.after ? count(pair.after.batch) : "–"), true],
        ["Undone", (pair) => (pair.before && pair.after ? count(Math.max(0, pair.after.batch - pair.before.batch)) : "–"), true],
        ["State then", (pair) => (pair.before ? bytes(pair.before.size_full) : "–"), true],
      ],
      stages,
    )),
  ];
}

/** Return a text as one word of a shell. */
function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

function compareView(report, chosen, ui) {
  const ids = [...report.cuts.keys()];
  if (ids.length < 2) {
    return section("Difference of two checkpoints", el("p", { class: "empty" }, "Two stored checkpoints are needed."));
  }
  const given = (chosen || "").split(",").map(Number);
  const second = report.cuts.has(given[1]) ? given[1] : ids[ids.length - 1];
  const first = report.cuts.has(given[0]) ? given[0] : ids.filter((id) => id !== second).pop();
  const [before, after] = [report.cuts.get(first), report.cuts.get(second)];
  const [one, two] = [first, second].map((id) => report.byId.get(id) || {});
  const [ofOne, ofTwo] = [first, second].map((id) => new Map((report.parts.get(id) || []).map((part) => [part.stage, part])));
  const took = (map, stage) => (map.has(stage) ? map.get(stage).duration_ms : null);
  const delta = (format, a, b) => (a === null || a === undefined || b === null || b === undefined ? "–" : `${b > a ? "+" : b < a ? "−" : "±"}${format(Math.abs(b - a))}`);
  const facts = [
    ["Triggered", (line) => moment(line.triggered_ms), () => duration(Math.abs((two.triggered_ms || 0) - (one.triggered_ms || 0)))],
    ["Kind", (line) => `${line.kind}${line.name ? ` ${line.name}` : ""}, ${line.mode || "aligned"}`, () => ""],
    ["Attempt", (line) => count(line.attempt), () => ""],
    ["Duration", (line) => duration(line.duration_ms), () => delta(duration, one.duration_ms, two.duration_ms)],
    ["State", (line) => bytes(line.size_full), () => delta(bytes, one.size_full, two.size_full)],
    ["New", (line) => bytes(line.size_new), () => delta(bytes, one.size_new, two.size_new)],
  ];
  const stages = paired(before.stages, after.stages, (row) => row.stage);
  const changed = (pair) => (!pair.before ? "added" : !pair.after ? "removed" : pair.before.partitions !== pair.after.partitions ? `partitions ${pair.before.partitions} → ${pair.after.partitions}` : "");
  return [
    section(
      "Difference of two checkpoints",
      el("form", { class: "filters" },
        field("From", cutChoice(report, "from", first, (value) => ui.go(`compare=${value},${second}`))),
        field("To", cutChoice(report, "to", second, (value) => ui.go(`compare=${first},${value}`)))),
      table("The two checkpoints", [["Fact", (row) => row[0]], [`${first}`, (row) => row[1](one), true], [`${second}`, (row) => row[1](two), true], ["Difference", (row) => row[2](), true]], facts),
    ),
    section("Stages", table(
      "Stages in both",
      [
        ["Stage", (pair) => stageLink(pair.key)],
        ["Batches", (pair) => (pair.before && pair.after ? delta(count, pair.before.batch, pair.after.batch) : "–"), true],
        [`State in ${first}`, (pair) => (pair.before ? bytes(pair.before.size_full) : "–"), true],
        [`State in ${second}`, (pair) => (pair.after ? bytes(pair.after.size_full) : "–"), true],
        ["Difference", (pair) => (pair.before && pair.after ? delta(bytes, pair.before.size_full, pair.after.size_full) : "–"), true],
        ["Files", (pair) => (pair.before && pair.after ? delta(count, pair.before.files, pair.after.files) : "–"), true],
        ["Duration", (pair) => delta(duration, took(ofOne, pair.key), took(ofTwo, pair.key)), true],
        ["Watermark", (pair) => (pair.before && pair.after && pair.before.watermark_ms && pair.after.watermark_ms ? delta(duration, pair.before.watermark_ms, pair.after.watermark_ms) : "–"), true],
        ["Change", changed],
      ],
      stages,
    )),
    section("Sinks", table(
      "Versions of tables",
      [
        ["Sink", (pair) => pair.key],
        [`In ${first}`, (pair) => (pair.before ? count(pair.before.version) : "–"), true],
        [`In ${second}`, (pair) => (pair.after ? count(pair.after.version) : "–"), true],
        ["Where", (pair) => (pair.before || pair.after).place],
      ],
      paired(before.sinks, after.sinks, (row) => `${row.stage}/${row.sink}`),
      "No sink is recorded in these checkpoints.",
    )),
    section("Sources", table(
      "Positions of sources",
      [
        ["Source", (pair) => pair.key],
        [`In ${first}`, (pair) => (pair.before ? pair.before.position : "–")],
        [`In ${second}`, (pair) => (pair.after ? pair.after.position : "–")],
      ],
      paired(before.sources, after.sources, (row) => `${row.stage}/${row.source}`),
      "No source is recorded in these checkpoints.",
    )),
  ];
}

/* ---- settings ---- */

function settingsView(report) {
  const steps = report.checkpoints.slice(-200).filter((line) => line.kind === "checkpoint" && line.triggered_ms);
  const pauses = figures(steps.slice(1).map((line, place) => line.triggered_ms - steps[place].triggered_ms));
  const modes = [...new Set(report.checkpoints.slice(-200).map((line) => line.mode).filter(Boolean))];
  const newestOfPath = newestCut(report);
  const partitions = newestOfPath ? newestOfPath.stages.filter((stage) => stage.partitions > 0) : [];
  const changes = report.events.filter((event) => event.event === "settings-changed");
  const starts = report.events.filter((event) => event.event === "run-started");
  const sinks = report.stages.flatMap((stage) => stage.sinks.map((sink) => ({ ...sink, stage: stage.name })));
  return [
    section(
      "Settings",
      el("p", { class: "small" }, "A root records what a job has done with its settings. Passwords, tokens and users in locations are not shown."),
      pairs([
        ["Job", report.job],
        ["Root", report.root],
        ["Read with", `spark_abs ${report.version}`],
        ["Page of", moment(report.made_ms)],
        ["Attempt", count(report.attempt)],
        ["Time between triggers", pauses ? `median ${duration(pauses.p50)}, greatest ${duration(pauses.max)}, of the last ${count(pauses.count)}` : "–"],
        ["Modes of barriers", modes.map((mode) => mode.replace(/_/g, " ")).join(", ") || "–"],
        ["Stored checkpoints", count(report.checkpoints.filter((line) => line.stored).length)],
      ]),
    ),
    section("As runs began", table("Settings of runs", [["Time", (event) => moment(event.at_ms)], ["Run", (event) => count(event.run), true], ["Process, and settings other than their defaults", (event) => event.text]], [...starts].reverse(), "No start of a run is recorded.")),
    section("Changed while the job ran", table("Changed settings", [["Time", (event) => moment(event.at_ms)], ["Run", (event) => count(event.run), true], ["Change", (event) => event.text]], [...changes].reverse(), "No setting was changed while the job ran.")),
    section("Sinks", table("Sinks and their options", [["Sink", (sink) => `${sink.stage}/${sink.name}`], ["Kind", (sink) => sink.kind], ["Where", (sink) => sink.place || "–"], ["Options", (sink) => sink.options.join("; ") || "–"]], sinks, "No sink is recorded.")),
    section("State", table("Partitions of state", [["Stage", (stage) => stageLink(stage.stage)], ["Partitions", (stage) => count(stage.partitions), true], ["Files", (stage) => count(stage.files), true], ["State", (stage) => bytes(stage.size_full), true]], partitions, "No stage has state that is stored.")),
  ];
}
