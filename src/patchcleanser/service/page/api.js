// Requests to the service. Addresses are relative, so that the page works behind any prefix.

export class Trouble extends Error {
  constructor(code, message, wait = 0) {
    super(message);
    this.code = code;
    this.wait = wait; // seconds until another try makes sense
  }
}

let key = sessionStorage.getItem("key");

export function useKey(value) {
  key = value;
  sessionStorage.setItem("key", value);
}

async function fetched(address, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    return await fetch(address, { ...options, headers });
  } catch {
    throw new Trouble("unreachable", "The service cannot be reached. Is it still running?", 3);
  }
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const wait = Number(response.headers.get("retry-after")) || 0;
  throw new Trouble(body?.error?.code ?? "unknown", body?.error?.message ?? `HTTP ${response.status}`, wait);
}

export async function facts(address) {
  return (await checked(await fetched(address))).json();
}

export async function picture(address) {
  return (await checked(await fetched(address))).blob();
}

export async function send(address, blobs, fields) {
  const form = new FormData();
  for (const blob of blobs) form.append("image", blob, "image.png");
  for (const [name, value] of Object.entries(fields)) {
    for (const item of Array.isArray(value) ? value : [value]) form.append(name, String(item));
  }
  return (await checked(await fetched(address, { method: "POST", body: form }))).json();
}
