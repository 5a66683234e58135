/** Addresses of servers: which forms there are, and which of them stay on this machine. */

import { BlockList, isIP } from "node:net";

const MAX_PORT = 65_535;
const HOST_AND_PORT = /^(\[[^[\]]+\]|[^:/[\]\s]+):(\d{1,5})$/;
const RESOLVED = /^(dns|ipv4|ipv6|unix):/; // names that grpc-js resolves by itself; their forms are its own
const PLACES = /^(?:dns|ipv4|ipv6):(?:\/\/[^/]*\/)?(.*)$/;

const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8, "ipv4");
LOOPBACK.addAddress("::1", "ipv6");

/** Returns what is wrong with an address and what would be right, or undefined. */
export function addressProblem(address: unknown): string | undefined {
  if (typeof address !== "string") return `is ${String(address)}; give host:port, as 127.0.0.1:50051`;
  const port = HOST_AND_PORT.exec(address)?.[2];
  if (port !== undefined) {
    return Number(port) <= MAX_PORT ? undefined : `is "${address}"; give a port from 1 to ${MAX_PORT}`;
  }
  if (RESOLVED.test(address)) return undefined;
  const [, scheme, rest] = /^([^:]*:\/\/)(.*)$/.exec(address) ?? ["", "", address];
  const without = scheme ? ` without ${scheme}` : "";
  return `is "${address}"; give host:port${without}, as ${example(rest ?? "")}`;
}

/** Returns an address with what can be used of a wrong one. */
function example(host: string): string {
  const place = host.split("/")[0] ?? "";
  if (HOST_AND_PORT.test(place)) return place;
  return /^[\w.-]+$/.test(place) ? `${place}:50051` : "127.0.0.1:50051";
}

/** Returns whether an address stays on this machine. */
export function isLoopback(address: string): boolean {
  if (address.startsWith("unix:")) return true;
  const places = PLACES.exec(address)?.[1]?.split(",") ?? [address];
  return places.every((place) => isLoopbackHost(hostOf(place)));
}

function hostOf(place: string): string {
  if (place.startsWith("[")) return place.slice(1).split("]")[0] ?? "";
  return place.split(":").length === 2 ? (place.split(":")[0] ?? "") : place;
}

function isLoopbackHost(host: string): boolean {
  const version = isIP(host);
  return version === 0 ? host === "localhost" : LOOPBACK.check(host, version === 4 ? "ipv4" : "ipv6");
}
