"""The steps of `RedisStore` that must be one: scripts that Redis runs.

Times are Redis's own, so the clocks of the routers do not matter. A `nil` in a table would end it,
so absent values are returned as `false`.
"""

from __future__ import annotations

from router.store.store import COUNTER_S, KEPT, MOST_DOCUMENT

__all__ = ["ANNOUNCE", "APPEND", "COMMIT", "GET", "MEMBERS", "REPORT", "TAKE", "WITHDRAW"]

# KEYS: document. The document is a hash of `version` and `value`.
GET = f"""
local value = redis.call('HMGET', KEYS[1], 'version', 'value')
if not value[1] then return {{'0', ''}} end
if #value[2] > {MOST_DOCUMENT} then return redis.error_reply('the document is too large') end
return {{value[1], value[2]}}
"""

# A server that was started again, or another one in its place, may lack the latest changes. Routers
# that know them find that out within `RESTORE_S`, so changes wait that long there.
#
# KEYS: document, sources, log, numbers, settling.
# ARGV: expected, version, value, restoring, settling (ms), channel, count of sources, count of
# entries, digest and source of each, entries, digests to drop.
COMMIT = f"""
local found = redis.call('HGET', KEYS[1], 'version') or '0'
if found ~= ARGV[1] then return 'stale' end
local info = redis.pcall('INFO', 'server')
local server = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''
local restarted = found ~= '0' and redis.call('HGET', KEYS[1], 'server') ~= server
redis.call('HSET', KEYS[1], 'server', server)
if restarted or ARGV[4] == '1' then redis.call('SET', KEYS[5], '1', 'PX', ARGV[5]) end
if ARGV[4] ~= '1' and redis.call('EXISTS', KEYS[5]) == 1 then return 'settling' end
local at = 9
for _ = 1, ARGV[7] do
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  at = at + 2
end
for _ = 1, ARGV[8] do
  redis.call('RPUSH', KEYS[3], redis.call('INCR', KEYS[4]) .. ' ' .. ARGV[at])
  at = at + 1
end
for i = at, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
redis.call('LTRIM', KEYS[3], -{KEPT}, -1)
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'value', ARGV[3])
redis.call('PUBLISH', ARGV[6], ARGV[2])
return 'done'
"""

# KEYS: log, numbers. ARGV: entry.
APPEND = f"""
local number = redis.call('INCR', KEYS[2])
redis.call('RPUSH', KEYS[1], number .. ' ' .. ARGV[1])
redis.call('LTRIM', KEYS[1], -{KEPT}, -1)
"""

# KEYS: counter. ARGV: member, values with spaces.
REPORT = f"""
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], {COUNTER_S})
return redis.call('HVALS', KEYS[1])
"""

# KEYS: buckets. ARGV: limit, needed, amount of each.
TAKE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local levels, admitted = {}, 1
for i, key in ipairs(KEYS) do
  local limit = tonumber(ARGV[3 * i - 2])
  local known = redis.call('HMGET', key, 'level', 'then')
  local level = limit
  if known[1] then
    if now < known[2] - 1 then  -- the clock was set back
      redis.call('HSET', key, 'then', string.format('%.6f', now))
    end
    level = math.min(limit, known[1] + math.max(0, now - known[2]) * limit / 60)
  end
  levels[i] = level
  if level < tonumber(ARGV[3 * i - 1]) then admitted = 0 end
end
local told = {admitted}
for i, key in ipairs(KEYS) do
  local limit = tonumber(ARGV[3 * i - 2])
  if admitted == 1 then
    levels[i] = levels[i] - tonumber(ARGV[3 * i])
    redis.call('HSET', key, 'level', string.format('%.9f', levels[i]),
      'then', string.format('%.6f', now))
    redis.call('EXPIRE', key, math.ceil((limit - levels[i]) / limit * 60) + 60)
  end
  told[i + 1] = string.format('%.9f', levels[i])
end
return told
"""

# KEYS: values, ends. ARGV: id, value, time to live (ms), channel.
ANNOUNCE = """
local time = redis.call('TIME')
local ends = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + ARGV[3]
local new = redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], string.format('%.0f', ends), ARGV[1])
if new then redis.call('PUBLISH', ARGV[4], 'member') end
"""

# KEYS: values, ends. ARGV: id, channel.
WITHDRAW = """
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then redis.call('PUBLISH', ARGV[2], 'member') end
"""

# KEYS: values, ends.
MEMBERS = """
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
return redis.call('HGETALL', KEYS[1])
"""
