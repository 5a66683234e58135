/**
 * Channels to a specdec service: message limits, pings, reconnection, and certificates that may be replaced.
 *
 * grpc gives a channel its credentials once. So another channel is opened when the files have changed: new calls go
 * there, and the old one closes after its last call.
 */

import { setTimeout as sleep } from "node:timers/promises";

import { Client, connectivityState, credentials, type ChannelCredentials, type ChannelOptions } from "@grpc/grpc-js";

import type { TlsContents, WatchedTls } from "./tls.js";

const MAX_MESSAGE_BYTES = 16 << 20;

/** How soon a connection counts as lost: pinged after `periodS` while calls run, answered within `timeoutS`. */
export interface Pings {
  readonly periodS: number;
  readonly timeoutS: number;
}

export const QUICK_PINGS: Pings = { periodS: 0.75, timeoutS: 1.25 };
export const PATIENT_PINGS: Pings = { periodS: 10, timeoutS: 20 }; // for large messages over slow connections
export const MAX_QUICK_BYTES = 64 << 10; // the largest request to send with quick pings: 51 kB a second carry it in time

const COMMON: ChannelOptions = {
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
  "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1000,
  "grpc.use_local_subchannel_pool": 1, // connections end with their client, and are not shared with another's
};
const IN_TURNS: ChannelOptions = { "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}' };

/** A channel for one call, to be released after it. */
export interface Lease {
  readonly client: Client;
  release(): void;
}

interface Opened {
  readonly client: Client;
  readonly credentials: ChannelCredentials;
  numCalls: number;
  isReplaced: boolean;
}

/** Returns what gives TLS credentials: the same object until the files are replaced. */
export function tlsCredentials(files: WatchedTls): () => ChannelCredentials {
  let contents: TlsContents | undefined;
  let current = credentials.createInsecure();
  return () => {
    if (contents !== files.contents) {
      contents = files.contents;
      current = credentials.createSsl(contents.ca, contents.key, contents.certificate);
    }
    return current;
  };
}

/** The channels of one client. A large request has a channel of its own, on which pings have time to come through. */
export class Channels {
  readonly #address: string;
  readonly #credentials: () => ChannelCredentials;
  readonly #options: ChannelOptions;
  readonly #current = new Map<Pings, Opened>();
  readonly #replaced = new Set<Opened>();

  constructor(address: string, credentials: () => ChannelCredentials, spreadsCalls: boolean, options: ChannelOptions) {
    this.#address = address;
    this.#credentials = credentials;
    this.#options = { ...COMMON, ...(spreadsCalls ? IN_TURNS : {}), ...options };
  }

  /** Returns the channel of the moment; the connection opens with the first call. */
  lease(pings: Pings): Lease {
    const opened = this.#now(pings);
    opened.numCalls += 1;
    return { client: opened.client, release: () => this.#release(opened) };
  }

  /** Closes all channels. */
  close(): void {
    for (const opened of [...this.#current.values(), ...this.#replaced]) opened.client.close();
    this.#current.clear();
    this.#replaced.clear();
  }

  #now(pings: Pings): Opened {
    const credentials = this.#credentials();
    const old = this.#current.get(pings);
    if (old?.credentials === credentials) return old;
    const client = new Client(this.#address, credentials, { ...this.#options, ...pingOptions(pings) });
    const opened = { client, credentials, numCalls: 0, isReplaced: false };
    this.#current.set(pings, opened);
    if (old) this.#replace(old);
    return opened;
  }

  #replace(old: Opened): void {
    old.isReplaced = true;
    this.#replaced.add(old);
    this.#closeIfUnused(old);
  }

  #release(opened: Opened): void {
    opened.numCalls -= 1;
    this.#closeIfUnused(opened);
  }

  #closeIfUnused(opened: Opened): void {
    if (opened.isReplaced && opened.numCalls === 0 && this.#replaced.delete(opened)) opened.client.close();
  }
}

/**
 * Waits until a channel is connected or has failed, and returns which; undefined after `limitS`, as grpc-js itself gives
 * a connection attempt as long as the system does, minutes.
 */
export async function hasConnected(client: Client, limitS: number, signal: AbortSignal): Promise<boolean | undefined> {
  const channel = client.getChannel();
  const limit = new AbortController();
  const isLate = sleep(limitS * 1000, true, { signal: AbortSignal.any([signal, limit.signal]) }).catch(() => true);
  try {
    for (let state = channel.getConnectivityState(true); ; state = channel.getConnectivityState(true)) {
      if (state === connectivityState.READY) return true;
      if (state === connectivityState.TRANSIENT_FAILURE || state === connectivityState.SHUTDOWN) return false;
      const before = state;
      const changed = new Promise<false>((resolve) =>
        channel.watchConnectivityState(before, Infinity, () => resolve(false)),
      );
      if (await Promise.race([changed, isLate])) return undefined;
    }
  } finally {
    limit.abort();
  }
}

function pingOptions({ periodS, timeoutS }: Pings): ChannelOptions {
  return { "grpc.keepalive_time_ms": periodS * 1000, "grpc.keepalive_timeout_ms": timeoutS * 1000 };
}
