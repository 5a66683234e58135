-- Begin a session, or recognise that it exists.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: fingerprint of the request, time to live (ms), packed prompt tokens, then meta's other fields and values
local known = redis.call('HGET', KEYS[1], 'fingerprint')
if known then
  return known == ARGV[1] and 'exists' or 'conflict'
end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], unpack(ARGV, 4))
redis.call('SET', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 'created'
