-- Before every script: who runs a session, and for how long all others leave it to them.
--
-- meta has three fields: `owner`, the name of the coordinator that claimed the session last; `leased_at`, when its lease
-- was renewed last (ms, by this server's clock); `lease`, how long it lasts then (ms). Claims, commits and heartbeats
-- renew it, `release` ends it. While it lasts, a claim of another coordinator gets the session to read, not to run: it
-- tails the log. `restore` makes one without an owner, for all of them to wait. The lease is for liveness alone. What
-- fences is the epoch: an owner whose lease has lapsed goes on until another one has claimed.

local function now_ms()
  local time = redis.call('TIME')
  return 1000 * tonumber(time[1]) + math.floor(tonumber(time[2]) / 1000)
end

-- How long nobody but the owner may claim a session. A clock that jumps back prolongs a lease at most to twice its
-- length, one that jumps further ends it.
local function lease_left_ms(meta)
  local lease = redis.call('HMGET', meta, 'leased_at', 'lease')
  if not lease[1] then
    return 0
  end
  local age, length = now_ms() - tonumber(lease[1]), tonumber(lease[2])
  return math.abs(age) < length and length - age or 0
end

local function renew_lease(meta, length)
  redis.call('HSET', meta, 'leased_at', string.format('%d', now_ms()), 'lease', length)
end
