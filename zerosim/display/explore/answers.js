// What is said on a click: why a rank waits, what a byte is, what a message carries, and what happens at a time.

const KIND_MEANS = {
  parameter: "the weights in the compute format, as they rest between two steps",
  gradient: "gradients, as they rest until the update",
  master: "the fp32 copy of the weights, to which the update is added",
  optimizer_state: "the optimizer's state, as Adam's moments; only the update reads it",
  gathered_parameter: "whole weights of one unit, gathered from all ranks for as long as it computes",
  secondary_parameter: "a second shard of the weights, kept inside the node",
  unit_gradient: "the gradient of one unit, whole, before it is reduced",
  activation: "what forward computed and backward will need",
  activation_gradient: "the gradient of an activation, on its way back",
  checkpointed_input: "a unit's input, from which backward runs its forward again",
  communication_buffer: "room for messages under way",
  workspace: "scratch memory of one computation",
  input: "the batch",
};
const PURPOSE_MEANS = { parameters: "parameters", gradients: "gradients", state: "optimizer state",
  control: "control: norms, overflow, whether all agree", unspecified: "the program's own purpose" };

const callWords = (call) => `${hyphened(call.operation)} ${call.unit ? `of ${call.unit}'s ${call.purpose} `
  : call.purpose === "unspecified" ? "" : `for ${call.purpose} `}(collective ${call.number})`;
const partWords = (part) => (part.call ? `the ${callWords(part.call)}`
  : part.stream === "communication" ? "a message of the program's own" : `the transfer of ${part.name}`);

// The rank whose arrival the others of a call waited for, and what it did until then.
function lastToArrive(run, call) {
  const last = call.parts.reduce((a, b) => (b.begun > a.begun ? b : a));
  const all = call.parts.every((part) => part.begun === last.begun);
  return { part: last, all, because: whyLate(run, last) };
}

// What a rank did until it came to a part.
function whyLate(run, part) {
  const rank = run.ranks[part.rank];
  const before = rank.parts.find((one) => one.stream === part.stream && one.ended === part.begun && one !== part);
  const computed = rank.computed.findLast((one) => one.end <= part.begun && one.start < part.begun);
  return part.begun > part.issued && before ? `its earlier ${partWords(before).slice(4)}`
    : computed ? `${computed.phase === "other arithmetic" ? "arithmetic" : computed.phase}${computed.unit ? ` of ${computed.unit}` : ""}` : "";
}

// Of these a rank waits for its own messages alone, from the root or to it, by way of others in a tree.
const ROOTED = ["gather", "scatter", "broadcast", "reduce"];

function whyRooted(run, wait) {
  const { call } = wait.part;
  const hops = hopsOf(call);
  if (!hops.length) return ["The page does not show the messages of so many ranks."];
  const me = call.group.indexOf(wait.rank);
  const fromRoot = ["scatter", "broadcast"].includes(call.operation);
  const root = call.group.findIndex((_, member) => hops.every((hop) => (fromRoot ? hop.destination : hop.source) !== member));
  const named = (member) => `rank ${call.group[member]}${member === root ? ", the root" : ""}`;
  const own = hops.filter((hop) => (hop.source === me || hop.destination === me) && hop.end > wait.start);
  const said = me === root ? ["It is the root."] : [];
  let ready = Math.max(wait.start, wait.part.begun);
  for (const hop of own) {
    const other = hop.source === me ? hop.destination : hop.source;
    const part = call.parts[other];
    if (hop.start > ready) {
      const busy = hops.find((one) => one !== hop && one.end === hop.start && (one.source === other || one.destination === other));
      const late = whyLate(run, part);
      const why = [
        part.begun > ready && `comes only at ${micro(part.begun)}${late && `, after ${late}`}: until then it has ${hop.source === other ? "sent" : "taken"} nothing`,
        busy && `until ${micro(hop.start)} ${busy.destination === other ? `has not got its own from ${named(busy.source)}` : `is sending to ${named(busy.destination)}`}`];
      said.push(`${micro(hop.start - ready)} are for ${named(other)}, which ${why.filter(Boolean).join(", and ") || "is not ready"}.`);
    }
    ready = Math.max(ready, hop.end);
  }
  const moving = own.reduce((sum, hop) => sum + hop.end - Math.max(hop.start, wait.start), 0);
  const ways = own.map((hop) => (hop.source === me ? `to ${named(hop.destination)}` : `from ${named(hop.source)}`));
  if (own.length) said.push(`${micro(moving)} are for ${own.length === 1 ? "the message" : `${own.length} messages`} ${ways.slice(0, 3).join(", ")}${ways.length > 3 ? " and others" : ""}.`);
  return said;
}

function whyWaiting(run, wait) {
  const { part } = wait;
  const said = [`Rank ${wait.rank} waits ${micro(wait.end - wait.start)}, from ${micro(wait.start)} to ${micro(wait.end)}, for ${partWords(part)}.`];
  if (!part.call) {
    if (part.stream !== "communication") said.push(`${bytes(part.nbytes)} go ${part.stream}, one transfer after the other.`);
    return said;
  }
  if (ROOTED.includes(part.call.operation)) return said.concat(whyRooted(run, wait));
  const last = lastToArrive(run, part.call);
  const before = Math.max(0, Math.min(wait.end, last.part.begun) - wait.start);
  const there = Math.max(wait.start, part.begun);
  if (last.all) said.push("All ranks arrive together: nobody is late.");
  else if (last.part.rank === wait.rank) said.push("It is the last to arrive itself: the others wait for it.");
  else said.push(`The last to arrive is rank ${last.part.rank}, at ${micro(last.part.begun)}${last.because ? `, after ${last.because}` : ""}.`);
  if (before > 0 && last.part.rank !== wait.rank && !last.all) said.push(`${micro(before)} of the wait are for that rank;`);
  else if (there > wait.start) said.push(`${micro(there - wait.start)} pass until its own stream is free;`);
  const steps = part.call.steps.length;
  const moving = wait.end - Math.max(wait.start, last.part.begun);
  if (moving > 0 && !steps) said.push(`${micro(moving)} are for the messages of so many ranks that the page does not show them.`);
  else if (moving > 0) said.push(`${micro(moving)} are for the messages: ${steps} ${steps === 1 ? "step" : "steps"}, one after the other.`);
  said.push(part.call.ahead && part.issued < wait.start ? `It was issued ahead, at ${micro(part.issued)}: what came before the wait was hidden behind arithmetic.`
    : "It was asked for where it was needed: nothing of it is hidden.");
  return said;
}

function whatBytes(run, array) {
  const rank = run.ranks[array.rank];
  const where = (clock) => rank.computed.findLast((one) => one.start <= clock)?.span || "";
  const said = [`${bytes(array.nbytes)} on rank ${array.rank}: ${spaced(array.kind)}${array.name && array.name !== array.kind ? `, ${array.name}` : ""}.`];
  if (KIND_MEANS[array.kind]) said.push(`That is ${KIND_MEANS[array.kind]}.`);
  if (array.born === 0 && array.died === Infinity) said.push("It is there before the step and after it.");
  else said.push(`It is there ${array.born === 0 ? "from the beginning" : `from ${micro(array.born)}${where(array.born) ? ` (in ${where(array.born)})` : ""}`} ${array.died === Infinity
    ? "to the end" : `to ${micro(array.died)}${where(array.died) ? ` (in ${where(array.died)})` : ""}`}.`);
  return said;
}

function whatPart(run, part) {
  if (!part.call) return [`Rank ${part.rank}: ${partWords(part)}, ${bytes(part.nbytes)}, from ${micro(part.begun)} to ${micro(part.ended)}.`];
  const { call } = part;
  const sent = hopsOf(call).reduce((sum, hop) => sum + (call.group[hop.source] === part.rank ? hop.nbytes : 0), 0);
  const said = [`${hyphened(call.operation)} ${call.unit ? `of ${call.unit}` : ""} (collective ${call.number}), ${listed(call.group).toLowerCase()}: a vector of ${bytes(call.nbytes)} for ${PURPOSE_MEANS[call.purpose] ?? call.purpose}.`];
  if (call.steps.length) said.push(`By ${call.algorithm}: ${call.steps.length} ${call.steps.length === 1 ? "step" : "steps"}; rank ${part.rank} sends ${bytes(sent)}.`);
  said.push(`Here from ${micro(part.begun)} to ${micro(part.ended)}${part.joined > part.begun ? `, of which ${micro(part.joined - part.begun)} until the last rank has come` : ""}${call.ahead ? "; issued ahead, so that arithmetic goes on beside it" : ""}.`);
  return said;
}

const whatCompute = (one) => [`Rank ${one.rank} computes ${one.span || "outside of all spans"}: ${micro(one.end - one.start)}, ${count(one.flops)} FLOPs.`];

const ANSWERS = { wait: whyWaiting, array: whatBytes, part: whatPart, compute: (run, one) => whatCompute(one) };

// What every rank does at a time; ranks that do the same are named together.
function whatHappens(run, clock) {
  const said = new Map();
  for (const rank of run.ranks) {
    const on = (one) => one.start <= clock && clock < one.end;
    const computed = rank.computed.find(on);
    const wait = rank.waits.find(on);
    const part = rank.parts.find((one) => one.call && on(one));
    const late = wait?.part.call && !ROOTED.includes(wait.part.call.operation) && lastToArrive(run, wait.part.call).part;
    const words = [wait ? `wait for ${partWords(wait.part)}${late && late.begun > clock && late.rank !== rank.rank ? `, to which rank ${late.rank} has not come yet` : ""}` : computed ? `compute ${computed.span || "arithmetic"}` : "",
      part && !(wait && wait.part === part) ? `beside it ${partWords(part)} is on its way` : ""].filter(Boolean).join("; ");
    const text = words || (clock >= run.end ? "done" : "nothing");
    said.set(text, [...(said.get(text) ?? []), rank.rank]);
  }
  const fullest = run.ranks.filter((rank) => rank.peakAt === clock);
  return [...said].map(([text, ranks]) => `${listed(ranks)}: ${text}.`).concat(fullest.length ? [fullestOf(run, fullest, clock)] : []);
}

// At the fullest moment: of what it is.
function fullestOf(run, ranks, clock) {
  const kinds = new Map();
  for (const array of stackAt(ranks[0], clock)) kinds.set(array.kind, (kinds.get(array.kind) ?? 0) + array.nbytes);
  const sorted = [...kinds].sort((a, b) => b[1] - a[1]).map(([kind, nbytes]) => `${spaced(kind)} ${nbytes.toLocaleString("en")}`);
  return `${listed(ranks.map((rank) => rank.rank))}: at the fullest, ${bytes(ranks[0].peak)}: ${sorted.join(", ")}.`;
}

// Two settings in numbers: what B takes, sends and holds, beside A.
function difference(a, b) {
  const most = (run, of) => Math.max(...run.ranks.map(of));
  const sent = (run) => run.ranks.reduce((sum, rank) => sum + Object.values(rank.sent).reduce((one, more) => one + more, 0), 0);
  const nodeOf = (run, rank) => Math.floor(rank / (run.raw.ranks_per_node ?? Infinity));
  const across = (run) => run.calls.reduce((sum, call) => sum + hopsOf(call).reduce((one, hop) => (
    nodeOf(run, call.group[hop.source]) === nodeOf(run, call.group[hop.destination]) ? one : one + hop.nbytes), 0), 0);
  const rests = (run) => most(run, (rank) => rank.arrays.reduce((sum, array) => sum + (array.born === 0 && array.died === Infinity ? array.nbytes : 0), 0));
  const beside = (name, of, words) => {
    const [first, second] = [of(a), of(b)];
    return `${name} ${words(second)}, A ${words(first)}${first && second !== first ? ` (×${(second / first).toFixed(2)})` : ""}`;
  };
  return `B ${[beside("takes", (run) => run.end, micro), beside("stands still for messages", (run) => most(run, (rank) => rank.waiting), micro),
    ...(most(a, (rank) => rank.waitingForHost) + most(b, (rank) => rank.waitingForHost) ? [beside("for its host", (run) => most(run, (rank) => rank.waitingForHost), micro)] : []),
    beside("its ranks together send", sent, bytes), ...(across(a) + across(b) ? [beside("of it across nodes", across, bytes)] : []),
    beside("one of them holds at rest", rests, bytes), beside("and at the fullest", (run) => run.peak, bytes)].join("; ")}.`;
}
