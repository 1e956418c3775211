"""What is done to a run's keys in one step each, as Lua that Redis runs (work_queue.py)."""

# All keys of a run are in one slot of a Redis Cluster: {fusionkv:run:NAME}:items, :state, :aside.

# KEYS items, state; ARGV cursor expected, the next, most items, milliseconds to live, then corpus, document...
# Gives how many were added: -1 if somebody else was first, 0 if there is no room.
FEED = """
if (redis.call('HGET', KEYS[2], 'cursor') or '') ~= ARGV[1] then return -1 end
local n = (#ARGV - 4) / 2
if redis.call('XLEN', KEYS[1]) + n > tonumber(ARGV[3]) then return 0 end
for i = 5, #ARGV, 2 do redis.call('XADD', KEYS[1], '*', 'corpus', ARGV[i], 'document', ARGV[i + 1]) end
redis.call('HSET', KEYS[2], 'cursor', ARGV[2])
redis.call('HINCRBY', KEYS[2], 'fed', n)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[4]) end
return n
"""
# KEYS items, state, aside; ARGV group, id, milliseconds to live, encoded, skipped, most set aside, then nothing, or
# fields and values to set the item aside with. Gives 1 to the one who ended the item, 0 to all others.
FINISH = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], 'why:' .. ARGV[2])
if #ARGV > 6 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*', unpack(ARGV, 7))
  redis.call('HINCRBY', KEYS[2], 'aside', 1)
else
  redis.call('HINCRBY', KEYS[2], 'done', 1)
  redis.call('HINCRBY', KEYS[2], 'encoded', ARGV[4])
  redis.call('HINCRBY', KEYS[2], 'skipped', ARGV[5])
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
return 1
"""
# KEYS items; ARGV group, consumer, milliseconds, then the ids in work here. The first of the others that was idle for
# so long is the consumer's from now on, and not delivered yet; gives its id.
CLAIM = """
local here, start = {}, '0-0'
for i = 4, #ARGV do here[ARGV[i]] = true end
repeat
  local found = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], start, 'COUNT', 1, 'JUSTID')
  start = found[1]
  if found[2][1] and not here[found[2][1]] then return found[2][1] end
until start == '0-0'
return false
"""
# KEYS items; ARGV group, consumer, id. Delivers what was claimed: gives fields and values, and how often it was
# delivered, now included; nothing if somebody else has it.
DELIVER = """
local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #held == 0 then return false end
return {redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3])[1][2], held[1][4] + 1}
"""
# KEYS items; ARGV group, consumer, id. Says again that the item is in work; 0 if somebody else has it.
KEEP = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
return 1
"""
# KEYS items, state; ARGV group, consumer, id, deliveries, reason, items done when it was taken or nothing. The
# delivery counts as none if nobody got anything done meanwhile: then it is not the item's fault.
GIVE_BACK = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
local count = tonumber(ARGV[4])
redis.call('HSET', KEYS[2], 'why:' .. ARGV[3], ARGV[5])
if ARGV[6] == (redis.call('HGET', KEYS[2], 'done') or '0') then count = count - 1 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', count, 'JUSTID')
return 1
"""
# KEYS items; ARGV group, consumer, milliseconds. All that the consumer has counts as idle for so long, and as not
# delivered to it.
RELEASE = """
local held = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000, ARGV[2])
for _, item in ipairs(held) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, item[1], 'IDLE', ARGV[3], 'RETRYCOUNT', item[4] - 1, 'JUSTID')
end
return #held
"""
