// What the closed forms of ZeRO say is held and sent, with the numbers of this setting in them, beside what was recorded.

class Formulas {
  constructor(side, box) {
    this.side = side;
    box.innerHTML = '<h3>Formulas <small></small></h3><div class="scroll" tabindex="0" role="region" aria-label="Formulas"><table></table></div><p class="under"></p>';
    [this.said, this.table, this.words] = ["small", "table", ".under"].map((name) => box.querySelector(name));
    this.table.addEventListener("pointerover", (event) => {
      const row = event.target.closest("tr");
      setLink(row?.dataset.kind ? { kind: row.dataset.kind } : row?.dataset.purpose ? { purpose: row.dataset.purpose } : null);
    });
    this.table.addEventListener("pointerleave", () => setLink(null));
  }

  show(run) { this.run = run; this.draw(); }

  draw() {
    if (!this.run) return;
    const { run } = this;
    const rank = Math.min(state.rank, run.ranks.length - 1);
    const of = run.ranks[rank];
    this.said.textContent = `of rank ${rank}, in bytes`;
    const rows = run.raw.formulas.map(([what, kind, form, value, nbytes]) => {
      const says = run.column(nbytes)[rank];
      const away = what === "held" ? run.raw.on_host[rank][kind] : 0;
      // What the step itself makes at its first instant is gone at its end, and does not rest.
      const measured = away || what !== "held" ? away || (of.sent[kind] ?? 0) : of.arrays.filter((array) => array.kind === kind && array.born === 0 && array.died === Infinity)
        .reduce((sum, array) => sum + array.nbytes, 0);
      return { what, kind, form: run.text(form), value: run.text(value), says, measured, away };
    });
    const total = (what, of_ = "measured") => rows.filter((row) => row.what === what).reduce((sum, row) => sum + row[of_], 0);
    const line = (row) => `<tr ${row.what === "held" ? `data-kind="${row.kind}"` : `data-purpose="${row.kind}"`}>
      <th scope="row"><i style="background:${row.what === "held" ? kindColor(row.kind) : purposeColor(row.kind)}"></i>${spaced(row.kind)}</th>
      <td class="form">${row.form}${row.value === "0" ? "" : `<small>= ${row.value}</small>`}</td><td class="n">${count(row.says)}</td>
      <td class="n" data-measured="${row.measured}">${row.away ? "on the host: " : ""}${count(row.measured)} ${row.measured === row.says ? "✓" : "≠"}</td>${
  row.what === "sent" ? `<td class="n" data-sent="${row.kind}"></td>` : "<td></td>"}</tr>`;
    const head = (title, last) => `<tr class="head"><th scope="col">${title}</th><td>formula</td><td class="n">says</td><td class="n">recorded</td><td class="n">${last}</td></tr>`;
    const sum = (what, now) => `<tr class="sum"><th scope="row">together</th><td></td><td class="n">${count(total(what, "says"))}</td><td class="n">${count(total(what))}</td>${now}</tr>`;
    this.table.innerHTML = `<tbody>${head("held at rest", "")}${rows.filter((row) => row.what === "held").map(line).join("")}${sum("held", "<td></td>")}
      ${head("sent in the step", "until now")}${rows.filter((row) => row.what === "sent").map(line).join("")}${sum("sent", '<td class="n" data-sent="all"></td>')}</tbody>`;
    const share = stackAt(of, of.peakAt).reduce((sum, array) => ({ ...sum, [array.kind]: (sum[array.kind] ?? 0) + array.nbytes }), {});
    const most = Object.entries(share).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([kind, nbytes]) => `${spaced(kind)} ${count(nbytes)}`).join(", ");
    this.words.innerHTML = `${PAGE.legend ?? ""} ${whySent(run, rows)} At its fullest rank ${rank} holds ${bytes(of.peak)}, at ${micro(of.peakAt)}: ${most}. Norms and flags: ${bytes(of.sent.control ?? 0)} more are sent.`;
    this.clock();
  }

  clock() {
    if (!this.run) return;
    const rank = Math.min(state.rank, this.run.ranks.length - 1);
    let all = 0;
    for (const cell of this.table.querySelectorAll("[data-sent]")) {
      const sent = cell.dataset.sent === "all" ? all : sentUntil(this.run, rank, cell.dataset.sent, state.clock);
      all += cell.dataset.sent === "all" ? 0 : sent;
      cell.textContent = count(sent);
    }
  }

  light() {
    for (const row of this.table.querySelectorAll("tr[data-kind], tr[data-purpose]")) {
      const { link } = state;
      row.classList.toggle("lit", Boolean(link) && (row.dataset.kind ? link.kind === row.dataset.kind
        : (link.purpose ?? (link.call != null ? this.run.calls[link.call]?.purpose : null)) === row.dataset.purpose));
    }
  }
}

// Why so much is sent: which collectives the stage makes of the parameters and of the gradients.
function whySent(run, rows) {
  const of = (purpose, operation, where = () => true) => run.calls.filter((call) => call.purpose === purpose && call.operation === operation && where(call)).length;
  const said = [];
  if (of("gradients", "all_reduce")) said.push("An all-reduce of gradients is a reduce-scatter and an all-gather: it counts twice.");
  if (of("gradients", "reduce_scatter")) said.push(`Gradients are reduce-scattered: once for each ${rows.some((row) => row.kind === "gradients" && !row.form.startsWith("1 ") && !row.form.startsWith("0")) ? "time they come" : "step"}.`);
  const forward = of("parameters", "all_gather", (call) => call.span.startsWith("forward"));
  const backward = of("parameters", "all_gather", (call) => call.span.startsWith("backward"));
  const after = of("parameters", "all_gather", (call) => !call.span.startsWith("forward") && !call.span.startsWith("backward"));
  const times = (kind) => parseInt(rows.find((row) => row.what === "sent" && row.kind === kind)?.form, 10) || 0;
  if (forward || backward) said.push(`Parameters are gathered for every forward, and again for every backward: with the gradients' reduce-scatters ${times("parameters") + times("gradients")}, where DDP sends two.`);
  if (run.calls.some((call) => call.group.length < run.ranks.length)) said.push("The mesh gathers and scatters inside a node, and sums shards across the nodes.");
  if (after) said.push("The updated parameters are gathered once, after the update.");
  return said.join(" ");
}
