// Conversations, kept in this browser: {id, title, changed, messages}. Where the browser keeps
// nothing (private windows of some), they last as long as the page.

let opened = null;
const unkept = new Map();

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("moe-runtime", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  }).catch(() => null);
  return opened;
}

async function act(mode, work) {
  const found = await database();
  if (!found) return undefined;
  const transaction = found.transaction("conversations", mode);
  const request = work(transaction.objectStore("conversations"));
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
  return request.result;
}

export const isKept = async () => await database() !== null;

export async function all() {  // the latest first; what has another shape is passed over
  const found = await isKept() ? await act("readonly", store => store.getAll()) : [...unkept.values()];
  const isSound = one => typeof one.title === "string" && Array.isArray(one.messages)
    && one.messages.every(message => message && typeof message.role === "string");
  return found.filter(isSound).sort((a, b) => b.changed - a.changed);
}

export async function put(conversation) {
  if (await isKept()) await act("readwrite", store => store.put(structuredClone(conversation)));
  else unkept.set(conversation.id, structuredClone(conversation));
}

export async function remove(id) {
  if (await isKept()) await act("readwrite", store => store.delete(id));
  else unkept.delete(id);
}
