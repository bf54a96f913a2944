-- Some live holds by the time of their end. A list takes one part after the other: no end of a hold ever moves back in
-- the index, so that one which is there all the time is in one of them.
--
-- KEYS  the index
-- ARGV  from which end on (empty: from now on), how many at most, what stands before a name in the key of its hold,
--       'holder' if the holders are wanted too
-- Returns the time in microseconds, how many entries were looked at, the end of the last one, and a JSON array: for
-- each hold its name, its head and maybe its holder. One text, since thousands of answers would take longer to read.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local from = ARGV[1] == '' and string.format('(%.0f', now) or ARGV[1]
local found = redis.call('ZRANGEBYSCORE', KEYS[1], from, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
local answer = {}
for i = 1, #found, 2 do
    local hold = redis.pcall('GET', ARGV[3] .. found[i])
    local expires = type(hold) == 'string' and #hold >= 112 and tonumber(string.sub(hold, 1, 16))
    local gate = expires and string.sub(hold, 49, 50) == '--'
    if expires and expires > now and not gate and not string.find(string.sub(hold, 1, 48), '%D') then
        answer[#answer + 1] = found[i]
        answer[#answer + 1] = string.sub(hold, 1, 48)
        if ARGV[4] == 'holder' then
            answer[#answer + 1] = string.sub(hold, 113)
        end
    end
end
local json = #answer > 0 and cjson.encode(answer) or '[]'
return {string.format('%.0f', now), #found / 2, found[#found] or '', json}
