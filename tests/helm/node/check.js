// Custom resources, one JSON object a line on stdin, against the types of the projects that define them.
//
// The generated validators know required fields, types, patterns and bounds, and let unknown fields pass, which an API server drops
// or refuses. The compiler of TypeScript knows the fields of a literal. Prints one JSON list of problems for each object.
import fs from "node:fs";
import path from "node:path";
import ts from "typescript";

const HERE = import.meta.dirname;
const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

function moduleOf(object) {
  const [group, version] = object.apiVersion.split("/");
  const kind = object.kind;
  return PACKAGES[group] && `@kubernetes-models/${PACKAGES[group]}/${group}/${version}/${kind}`;
}

async function valueProblems(object, module) {
  const model = new (await import(module))[object.kind](object);
  try {
    model.validate();
    return [];
  } catch (error) {
    return [String(error.message)];
  }
}

// One program for all objects: the compiler's start is most of the time.
function fieldProblems(objects) {
  const name = path.join(HERE, "objects.ts");
  const lines = objects.map(
    ([object, module], i) => `import {I${object.kind} as T${i}} from "${module}"; export const o${i}: T${i} = ${JSON.stringify(object)};`,
  );
  const options = { strict: true, noEmit: true, skipLibCheck: true, module: ts.ModuleKind.NodeNext, target: ts.ScriptTarget.ES2022 };
  const host = ts.createCompilerHost(options);
  const { getSourceFile, fileExists, readFile } = host;
  const text = lines.join("\n");
  host.getSourceFile = (file, ...more) =>
    file === name ? ts.createSourceFile(file, text, ts.ScriptTarget.ES2022) : getSourceFile.call(host, file, ...more);
  host.fileExists = (file) => file === name || fileExists.call(host, file);
  host.readFile = (file) => (file === name ? text : readFile.call(host, file));
  const found = objects.map(() => []);
  for (const told of ts.getPreEmitDiagnostics(ts.createProgram([name], options, host))) {
    const message = ts.flattenDiagnosticMessageText(told.messageText, " ");
    if (told.file?.fileName !== name) throw new Error(message);
    found[told.file.getLineAndCharacterOfPosition(told.start).line].push(message);
  }
  return found;
}

const objects = fs.readFileSync(0, "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line));
const known = objects.map((object) => [object, moduleOf(object)]);
const fields = fieldProblems(known.filter(([, module]) => module));
for (const [object, module] of known) {
  const told = module ? [...fields.shift(), ...(await valueProblems(object, module))] : [`${object.apiVersion} ${object.kind} is unknown here`];
  console.log(JSON.stringify(told));
}
